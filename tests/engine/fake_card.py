"""A card made of the CPU's kernels, which records and replays as CUDA graphs do.

Between ``begin`` and ``end`` nothing runs: every launch is noted with the memory it was given, and
a replay launches the same again on that memory, whatever the host has done since. Memory comes from
a pool that all graphs share and is another tensor's as soon as nobody holds it, so that what is
kept too short, read too late or written by nobody gives wrong numbers. What the host writes reaches
the card by ``send`` alone.

Kernels are those of the CPU, whose bits do not depend on the batch; those that follow requests are
taught to pass over rows that are nobody's, as the card's do, and leave nonsense in them. Where
Triton interprets, the card's own kernels are launched.
"""

from __future__ import annotations

import dataclasses
import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdk import LLM
from sdk.engine.rank.step_buffers import Buffers
from sdk.kernels import context, graph
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.packed_shapes import PackedShapes
from sdk.kernels.sampling import DRAW, Change, ChangeKind, SampleBuffers, Shape

_NONSENSE = 1e3
_POOL_BYTES = 1 << 28  # of address space


class Pool:
    """Float32 tensors, each at the lowest address that no living one has."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, _POOL_BYTES)
        self._whole = np.frombuffer(memory, np.uint8)
        self._memory = memory
        self._bytes = torch.from_numpy(self._whole)
        self.living: set[tuple[int, int]] = set()

    def take(self, count: int) -> Tensor:
        size = -(-count * 4 // 64) * 64
        begin = 0
        for first, last in sorted(self.living):
            if first - begin >= size:
                break
            begin = last
        array = np.frombuffer(self._memory, np.float32, count, offset=begin)
        self.living.add((begin, begin + size))
        weakref.finalize(array, self.living.discard, (begin, begin + size))
        return torch.from_numpy(array)

    def alias(self, given: Any) -> Any:
        """The same memory in other tensors, which do not keep it from being somebody else's."""
        if isinstance(given, Tensor):
            at = given.data_ptr() - self._bytes.data_ptr()
            if not 0 <= at < _POOL_BYTES:
                return given
            values = self._bytes.view(given.dtype)
            return values.as_strided(given.shape, given.stride(), at // given.itemsize)
        if isinstance(given, tuple | list):
            return type(given)(map(self.alias, given))
        if dataclasses.is_dataclass(given) and not isinstance(given, type):
            fields = {f.name: getattr(given, f.name) for f in dataclasses.fields(given) if f.init}
            return dataclasses.replace(given, **{k: self.alias(v) for k, v in fields.items()})
        return given


class _Recorded:
    """A graph."""

    def __init__(self, launches: list[Callable[[], Any]], replayed: Callable[[], None]) -> None:
        self._launches, self._replayed = launches, replayed

    def replay(self) -> None:
        self._replayed()
        with torch.inference_mode():
            for launch in self._launches:
                launch()


class _TorchLaunches(TorchDispatchMode):
    """torch's own launches; a new tensor that torch would fill is none we know to record."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).rpartition(".")[0] in graph._VIEWS:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._card.launch(partial(func, **kwargs), *args)
            return args[0]
        with self:
            result = func.decompose(*args, **kwargs)
        assert result is not NotImplemented, f"{func} in a recording"
        return result


class FakeCard:
    """A ``GraphRecorder`` that stands in for a card, for one engine."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.ops: Any = None
        self.graphs = self.replays = 0
        self._launches: list[Callable[[], Any]] | None = None
        self._mode: Any = None

    def warm_up(self, forward: Callable[[], object]) -> None:
        forward()

    def begin(self) -> None:
        assert self._launches is None
        self._launches, self._mode = [], _TorchLaunches(self)
        self.ops.context.capture_pool = self.pool
        self._mode.__enter__()

    def end(self) -> Any:
        assert self._launches is not None
        self._mode.__exit__(None, None, None)
        self.ops.context.capture_pool = None
        launches, self._launches = self._launches, None
        self.graphs += 1
        return _Recorded(launches, self._count)

    def _count(self) -> None:
        self.replays += 1

    def launch(self, function: Callable[..., Any], *args: Any) -> None:
        if self._launches is None:
            function(*args)
        else:
            self._launches.append(partial(function, *map(self.pool.alias, args)))

    def sample(
        self, kernel: Any, logits: Tensor, draws: Tensor, shapes: PackedShapes | None = None
    ) -> Tensor:
        """``SamplingOps.sample_rows``, its result in the pool as the card's is."""
        shape = len(logits), 3
        out = torch.zeros(shape, dtype=torch.float64) if self._launches is None else None
        if out is None:
            out = self.pool.take(6 * len(logits)).view(torch.float64).view(shape)
        self.launch(partial(_sample, kernel, shapes), logits, draws, out)
        return out


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
    cos, sin, batch, pages = rest
    n = int((batch.slots >= 0).sum())
    own = dataclasses.replace(batch, positions=batch.positions[:n], slots=batch.slots[:n])
    if n:
        kernel(q[:n], k[:n], v[:n], cos[:n], sin[:n], own, pages)


def _attention(kernel: Any, q: Tensor, pages: Any, batch: AttentionBatch, *rest: Any) -> None:
    *options, out = rest
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
    kernel(q[:tokens], pages, own, *options, out[:tokens])


def _sample(
    kernel: Any, shapes: PackedShapes | None, logits: Tensor, draws: Tensor, out: Tensor
) -> None:
    if hasattr(kernel, "rows"):
        out.copy_(kernel.rows(logits, draws, shapes))
        return
    found = SampleBuffers(len(logits))
    for row in range(len(logits) if shapes is not None else 0):
        found.set_shape(row, _unpacked(shapes, row))
    kernel.run(logits, draws.numpy().view(DRAW)[:, 0], found)
    out.copy_(torch.tensor(found.read(len(logits)), dtype=torch.float64).t())


def _unpacked(shapes: PackedShapes, row: int) -> Shape | None:
    """How a row changes, as the card knows it."""
    slot = int(shapes.owners[row])
    if slot < 0:
        return None
    begin, end, *masks = shapes.slots[slot].tolist()
    changes = []
    for number in range(begin, end):
        kind, first, last = shapes.changes[number, :3].tolist()
        entries = shapes.entries[first:last].numpy()
        factors = shapes.changes[number, 3:].numpy().view(np.float32)
        values = entries[:, 1].copy().view(np.float32) if kind < ChangeKind.FORBID else ()
        changes.append(Change(kind, entries[:, 0], values, factors))
    words = [shapes.masks[at].numpy().view(np.uint32) for at in masks if at >= 0]
    return Shape(np.bitwise_and.reduce(words) if words else None, changes)


_TAUGHT = {"find_places": _places, "rope_and_cache": _rope, "attention": _attention}


class _Kernel:
    """An implementation whose launches the card sees."""

    def __init__(self, inner: Any, op: str, card: FakeCard) -> None:
        self._inner, self._card = inner, card
        if op == "sample":
            self.rows = partial(card.sample, inner)
        elif hasattr(inner, "rows"):
            self.rows = partial(card.launch, inner.rows)
        run = getattr(inner, "run", None)
        if op in _TAUGHT and inner.name.startswith("cpu."):
            run = partial(_TAUGHT[op], run)
        self.run = partial(card.launch, run)
        for name in ("matmul", "matmul_routed"):
            if hasattr(inner, name):
                setattr(self, name, partial(card.launch, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Backend:
    """A backend of a card."""

    def __init__(self, inner: Any, card: FakeCard) -> None:
        self.inner, self.card = inner, card
        self.name, self.keys_transposed = inner.name, inner.keys_transposed
        self.offloaded, self.shares_keys = inner.offloaded, inner.shares_keys
        self.close = inner.close

    def graph_recorder(self) -> FakeCard:
        return self.card

    def implementations(self, op: str) -> Sequence[Any]:
        return [_Kernel(inner, op, self.card) for inner in self.inner.implementations(op)]


def _apart(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)


@contextmanager
def on_a_card(path: Any, **options: Any) -> Iterator[tuple[LLM, FakeCard]]:
    """An engine whose steps are recorded as on a card."""
    card, opened = FakeCard(), context.open_backends

    def open_backends(*args: Any, **kwargs: Any) -> Any:
        backends, missing = opened(*args, **kwargs)
        return [_Backend(backend, card) for backend in backends], missing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "open_backends", open_backends)
        patch.setattr(Buffers, "_memory", staticmethod(_apart))
        llm = LLM(path, enforce_eager=True, **options)
    with llm:
        runner, scheduler = llm._runner(), llm._driver._engine.scheduler
        card.ops = runner.ops
        runner.record()
        scheduler.pages_ahead, scheduler.batches_in_flight = runner.ahead
        yield llm, card
