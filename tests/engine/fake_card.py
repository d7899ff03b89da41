"""An engine on a card that is not here: ``fake_cuda.py`` stands for torch.cuda, and the kernels are
those of the CPU, whose bits do not depend on the batch. Those that follow requests are taught to
pass over rows that are nobody's, as the card's do, and leave nonsense in them. Where Triton
interprets, the card's own kernels are launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import CardTensor, Cuda, without_a_gpu
from torch import Tensor

from sdk import LLM
from sdk.kernels import context
from sdk.kernels.known_answers import check as known_answers
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import DRAW, Change, ChangeKind, SampleBuffers, Shape
from sdk.kernels.packed_shapes import PackedShapes
from sdk.loading import load

_NONSENSE = 1e3


def plain(x: Any) -> Any:
    """The same with tensors of the CPU over the same memory."""
    if isinstance(x, CardTensor):
        return x.inner
    if isinstance(x, tuple | list):
        return type(x)(*map(plain, x)) if hasattr(x, "_fields") else type(x)(map(plain, x))
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
        changed = {name: plain(value) for name, value in fields.items()}
        if any(changed[name] is not value for name, value in fields.items()):
            return dataclasses.replace(x, **changed)
    return x


def tensors_of(x: Any) -> list[CardTensor]:
    """All tensors of the card in arguments."""
    if isinstance(x, CardTensor):
        return [x]
    if isinstance(x, tuple | list):
        return [found for one in x for found in tensors_of(one)]
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return tensors_of([getattr(x, f.name) for f in dataclasses.fields(x)])
    return []


def _places(kernel: Any, batch: AttentionBatch) -> None:
    tokens = torch.arange(batch.num_tokens)
    owners = torch.searchsorted(batch.query_start.long(), tokens, right=True) - 1
    real = owners < batch.num_requests
    owners = owners.clamp(max=batch.num_requests - 1)
    ends = batch.query_start[owners + 1].long()
    positions = torch.where(real, batch.context_len[owners] - ends + tokens, 0)
    pages = batch.page_table[owners, positions // batch.page_size].long()
    slots = pages * batch.page_size + positions % batch.page_size
    batch.positions.copy_(positions)
    batch.slots.copy_(torch.where(real, slots, -1))


def _rope(kernel: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
    cos, sin, batch, pages, *options = rest
    n = int((batch.slots >= 0).sum())
    own = dataclasses.replace(batch, positions=batch.positions[:n], slots=batch.slots[:n])
    if n:
        kernel(q[:n], k[:n], v[:n], cos[:n], sin[:n], own, pages, *options)


def _attention(kernel: Any, q: Tensor, pages: Any, batch: AttentionBatch, *rest: Any) -> None:
    *options, out, causal, biases, chunked = rest
    n = int((batch.query_start.diff() > 0).sum())
    tokens = int(batch.query_start[n])
    own = dataclasses.replace(
        batch,
        positions=batch.positions[:tokens],
        slots=batch.slots[:tokens],
        query_start=batch.query_start[: n + 1],
        context_len=batch.context_len[:n],
        page_table=batch.page_table[:n],
    )
    out.fill_(_NONSENSE)
    kernel(q[:tokens], pages, own, *options, out[:tokens], causal, biases, chunked)


def _sample(
    kernel: Any, shapes: PackedShapes | None, logits: Tensor, draws: Tensor, out: Tensor
) -> None:
    if hasattr(kernel, "rows"):
        names = ("owners", "slots", "changes", "entries", "masks", "side")
        given = shapes and SimpleNamespace(**{x: plain(getattr(shapes, x)) for x in names})
        out.copy_(kernel.rows(logits, draws, given))
        return
    found = SampleBuffers(len(logits))
    for row in range(len(logits) if shapes is not None else 0):
        found.set_shape(row, _unpacked(shapes, row))
    kernel.run(logits, draws.numpy().view(DRAW)[:, 0], found)
    out.copy_(torch.tensor(found.read(len(logits)), dtype=torch.float64).t())


def _unpacked(shapes: PackedShapes, row: int) -> Shape | None:
    """How a row changes, as the card knows it."""
    owners, slots, all_changes, all_entries, all_masks = (
        plain(x)
        for x in (shapes.owners, shapes.slots, shapes.changes, shapes.entries, shapes.masks)
    )
    slot = int(owners[row])
    if slot < 0:
        return None
    begin, end, *masks = slots[slot].tolist()
    changes = []
    for number in range(begin, end):
        kind, first, last = all_changes[number, :3].tolist()
        entries = all_entries[first:last].numpy()
        factors = all_changes[number, 3:].numpy().view(np.float32)
        values = entries[:, 1].copy().view(np.float32) if kind < ChangeKind.FORBID else ()
        changes.append(Change(kind, entries[:, 0], values, factors))
    words = [all_masks[at].numpy().view(np.uint32) for at in masks if at >= 0]
    return Shape(np.bitwise_and.reduce(words) if words else None, changes)


_TAUGHT = {"find_places": _places, "rope_and_cache": _rope, "attention": _attention}


class _Kernel:
    """An implementation whose launches the card sees."""

    def __init__(self, inner: Any, op: str, cuda: Cuda) -> None:
        self._inner, self._cuda = inner, cuda
        self._layouts: list[Any] = []
        self._taught = _TAUGHT.get(op) if inner.name.startswith("cpu.") else None
        if op == "sample":
            self.rows, self.run = self._sampled_rows, self._sample_on_host
        elif hasattr(inner, "rows"):
            self.rows = partial(self._launch, inner.rows)
        for name in ("matmul", "matmul_routed", "run", "run_rounded"):
            if hasattr(inner, name) and name not in self.__dict__:
                setattr(self, name, partial(self._launch, getattr(inner, name)))

    def _launch(self, function: Callable[..., Any], *args: Any) -> None:
        for x in args:
            names = AttentionBatch.__slots__ if isinstance(x, AttentionBatch) else ()
            for one in (x, *(getattr(x, name) for name in names)):
                assert not isinstance(one, Tensor) or isinstance(one, CardTensor), "of the host"
        found = tensors_of(args)
        given = plain(args)
        if self._taught is not None:
            function = partial(self._taught, function)
        self._cuda.launch(partial(function, *given), found, found)

    def _sampled_rows(
        self, logits: Tensor, draws: Tensor, shapes: PackedShapes | None = None
    ) -> Tensor:
        """``SamplingOps.sample_rows``, whose result stays on the card."""
        out = torch.empty(len(logits), 3, dtype=torch.float64, device=logits.device)
        given = plain([logits, draws, out])
        reads = [logits, draws]
        if shapes is not None:
            reads += [shapes.owners, shapes.slots, shapes.changes, shapes.entries, shapes.masks]
        self._cuda.launch(partial(_sample, self._inner, shapes, *given), reads, [out])
        return out

    def _sample_on_host(self, logits: Tensor, draws: Any, out: SampleBuffers) -> None:
        assert isinstance(logits, CardTensor)
        self._inner.run(self._cuda.to_host(logits), draws, out)

    def pack(self, layout: Any) -> Any:
        self._layouts.append(layout)  # what is packed may be in its memory
        return self._inner.pack(plain(layout))

    def bind(self, layers: Any) -> Callable[..., None]:
        found, run = tensors_of(layers), self._inner.bind(plain(list(layers)))
        return lambda *pages: self._cuda.launch(partial(run, *pages), found, found)

    def table(self, shape: Any, dtype: Any, device: Any) -> Any:
        return _Table(self._inner.table(shape, dtype, torch.device("cpu")), self._cuda)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Table:
    """The adapters of one product. Its kernel follows pointers to factors, which are read here."""

    def __init__(self, inner: Any, cuda: Cuda) -> None:
        self._inner, self._cuda = inner, cuda
        self._placed: dict[int, Any] = {}

    def place(self, factors: Any, memory: Tensor) -> Any:
        found = self._inner.place(plain(factors), plain(memory))
        self._cuda.launched(tensors_of(list(factors)), [memory])  # type: ignore[list-item]
        self._last = memory
        return found

    def write(self, slot: int, update: Any) -> None:
        self._inner.write(slot, plain(update))

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        given, found = plain([x, y, slots]), tensors_of([x, y, slots])
        self._cuda.launch(partial(self._inner.add, *given), found, found)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Backend:
    """A backend of a card."""

    captures = True

    def __init__(self, inner: Any, cuda: Cuda) -> None:
        self.inner, self._cuda = inner, cuda
        self.name, self.keys_transposed = inner.name, inner.keys_transposed
        self.offloaded, self.shares_keys = inner.offloaded, True
        self.close = inner.close

    def finish_packing(self) -> None:
        self.inner.finish_packing()

    def work_shape(self, requests: int, heads: int, kv_heads: int, head_dim: int) -> None:
        return None

    def implementations(self, op: str) -> Sequence[Any]:
        return [_Kernel(inner, op, self._cuda) for inner in self.inner.implementations(op)]


@contextmanager
def on_a_card(
    path: Any, answers: dict[str, str] | None = None, **options: Any
) -> Iterator[tuple[LLM, Cuda]]:
    """An engine on a card. ``answers``: that kind of machine, whose kernels are then checked."""
    opened = context.open_backends

    def open_backends(device: str, *args: Any, **kwargs: Any) -> Any:
        backends, missing = opened("cpu", *args, **kwargs)
        if device == "cpu":  # an engine that has left the card
            return backends, missing
        return [_Backend(backend, cuda) for backend in backends], missing

    options = {"kv_cache_memory_bytes": "4MiB"} | options
    with without_a_gpu() as cuda, pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "open_backends", open_backends)
        patch.setattr(
            load,
            "_device",
            lambda config: "cuda:0" if answers is None or config.device == "cuda" else "cpu",
        )
        if answers is None:  # interpreted, they take seconds
            patch.setattr(Ops, "check_answers", lambda *_: None)
        else:
            patch.setattr(known_answers, "machine", lambda device: answers)
        with LLM(path, **options) as llm:
            yield llm, cuda
        cuda.check()
