"""A card that is not here: engines and launchers run as on it, and their launches are listed.

Weights are as large as real ones and hold anything. Steps are recorded and replayed, so that a
decode step launches what a replayed graph of a card would; nothing is computed, and every token
is 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from machine_code import Started, all_launches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.backends.compiler import GPUTarget

from sdk import kernels
from sdk.api.config import EngineConfig
from sdk.bench.gpu.card import Card
from sdk.bench.gpu.engine import add
from sdk.bench.gpu.models import RandomCheckpoint
from sdk.engine.engine import Engine
from sdk.engine.rank.step_buffers import Buffers
from sdk.kernels import context, registry
from sdk.kernels.gpu import dense, packing, tuning
from sdk.kernels.host.torch_views import VIEWS
from sdk.kernels.self_check import SelfCheck
from sdk.loading.load import load

#: What allocates, and starts no kernel.
_NO_LAUNCH = VIEWS | {
    *("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.is_pinned"),
}

_PRODUCTS = ("aten.mm", "aten._scaled_mm")


class ListedCard(Card):
    """A card with this many processors; nothing is timed. ``old``: without matrix instructions."""

    def __init__(self, processors: int, old: bool) -> None:
        super().__init__({}, rehearsing=True)
        self.tiny, self.old = False, old
        dense_from = kernels.gpu.DENSE_FROM_WITHOUT_MMA if old else tuning.Tuning(1).dense_from
        self.tuning = tuning.Tuning(4 * processors, dense_from=dense_from)

    def size(self, real: int, tiny: int) -> int:
        return real

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def matrix(self, n: int, k: int) -> Tensor:
        return self.normal(n, k)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8 if high <= 256 else torch.int64)


class TorchLaunch(NamedTuple):
    """One of torch's own: bytes of its tensors; of a product ``m``, ``n``, ``k`` and its type.

    ``macs``: of a kernel of a library that is not a plain product.
    """

    name: str
    nbytes: int
    product: tuple[int, int, int] | None = None
    narrow: bool = False
    macs: float = 0.0


class TorchLaunches(TorchDispatchMode):
    """Lists torch's operators that start a kernel of a card; products are not computed."""

    def __init__(self, listed: list[TorchLaunch]) -> None:
        super().__init__()
        self._listed = listed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).rpartition(".")[0]
        if name in _PRODUCTS:
            return self._product(name, *args, **kwargs)
        if name in LIBRARIES:
            return LIBRARIES[name](self._listed, name, *args, **kwargs)
        result = func(*args, **kwargs)
        same = name == "aten.to" and result is args[0]
        if not (same or name in _NO_LAUNCH):
            tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
            nbytes = sum({id(x): x.nbytes for x in tensors}.values())
            if name == "aten.index":  # reads as many bytes as it writes
                nbytes = 2 * result.nbytes
            self._listed.append(TorchLaunch(name, nbytes))
        return result

    def _product(
        self, name: str, x: Tensor, w: Tensor, *_: Any, out: Tensor | None = None, **more: Any
    ) -> Tensor:
        (m, k), n = x.shape, w.shape[1]
        if out is None:
            out = torch.empty(m, n, dtype=more.get("out_dtype") or x.dtype)
        nbytes = x.nbytes + w.nbytes + out.nbytes
        self._listed.append(TorchLaunch(name, nbytes, (m, n, k), x.itemsize == 1))
        return out


def _grouped(listed: list[TorchLaunch], name: str, x: Tensor, w: Tensor, *_: Any) -> Tensor:
    """Each row by one of the experts, all of which are read."""
    out = torch.empty(x.shape[0], w.shape[2], dtype=x.dtype)
    macs = float(x.shape[0] * w.shape[1] * w.shape[2])
    listed.append(TorchLaunch(name, x.nbytes + w.nbytes + out.nbytes, macs=macs))
    return out


def _attention(
    listed: list[TorchLaunch], name: str, q: Tensor, k: Tensor, v: Tensor, bias: Any, sums: bool,
    dropout: float, causal: bool, *_: Any, **__: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Two products, of half of the pairs with a mask."""
    out, found = torch.empty_like(q), torch.empty(*q.shape[:3], 1)
    macs = (1.0 if causal else 2.0) * q.numel() * k.shape[2]
    listed.append(TorchLaunch(name, 2 * q.nbytes + k.nbytes + v.nbytes, macs=macs))
    none = torch.empty(0, dtype=torch.int64)
    return out, found, none, none, q.shape[2], k.shape[2], none, none, out


def _gathered(listed: list[TorchLaunch], name: str, x: Tensor, dim: int, ids: Tensor) -> Tensor:
    """The ids are not computed here, so they may be anything."""
    shape = [*x.shape[:dim], ids.shape[0], *x.shape[dim + 1 :]]
    out = torch.empty(shape, dtype=x.dtype)
    listed.append(TorchLaunch(name, 2 * out.nbytes))
    return out


#: What lists a kernel of a library, with its name, and gives results of the right shapes.
LIBRARIES: dict[str, Callable[..., Any]] = {
    "aten._grouped_mm": _grouped,
    "aten._scaled_dot_product_cudnn_attention": _attention,
    "aten.index_select": _gathered,
}


class _Noted(TorchDispatchMode):
    """Notes torch's own launches for the replays of a graph."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).rpartition(".")[0] in _NO_LAUNCH:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self._recorder.launch(partial(func, **kwargs), *args)
            return args[0]
        with self:
            result = func.decompose(*args, **kwargs)
        assert result is not NotImplemented, f"{func} in a recording"
        return result


class _Recorder:
    """In place of :class:`sdk.kernels.card.Card`: a graph is what is launched between ``begin`` and
    ``end``. ``torch``: what torch launched in the last replay."""

    def __init__(self) -> None:
        self.torch: list[TorchLaunch] = []
        self.replays = 0
        self.context: Any = None
        self._noted: list[Callable[[], Any]] | None = None
        self._mode = _Noted(self)
        self._sampled = torch.zeros(256, 3, dtype=torch.float64)

    @contextmanager
    def capturing(self, forward: Callable[[], object]) -> Iterator[None]:
        with TorchLaunches([]):  # nothing is computed
            forward()
        yield

    def begin(self) -> None:
        self._noted = []
        self.context.capture_pool = SimpleNamespace(take=torch.empty)
        self._mode.__enter__()

    def end(self) -> Any:
        assert self._noted is not None
        self._mode.__exit__(None, None, None)
        self.context.capture_pool = None
        noted, self._noted = self._noted, None
        return SimpleNamespace(replay=partial(self._replay, noted))

    def _replay(self, noted: Sequence[Callable[[], Any]]) -> None:
        self.replays += 1
        self.torch.clear()
        with torch.inference_mode(), _disable_current_modes(), TorchLaunches(self.torch):
            for launch in noted:
                launch()

    def launch(self, function: Callable[..., Any], *args: Any) -> None:
        if self._noted is None:
            function(*args)
        else:
            self._noted.append(partial(function, *args))

    def sample(self, rows: Callable[..., Tensor], logits: Tensor, *given: Any) -> Tensor:
        """``SamplingOps.sample_rows``."""
        self.launch(rows, logits, *given)
        return self._sampled[: len(logits)]


class _Kernel:
    """An implementation whose launches are recorded."""

    def __init__(self, inner: Any, op: str, recorder: _Recorder) -> None:
        self._inner = inner
        for name in ("run", "run_rounded", "rows", "matmul", "matmul_routed"):
            if hasattr(inner, name):
                launch = recorder.sample if (op, name) == ("sample", "rows") else recorder.launch
                setattr(self, name, partial(launch, getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Backend:
    """A backend whose launches are recorded."""

    captures = True

    def __init__(self, inner: Any, recorder: _Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def implementations(self, op: str) -> Sequence[Any]:
        return [_Kernel(inner, op, self._recorder) for inner in self._inner.implementations(op)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _apart(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory of the host and of the card for :class:`Buffers`."""
    return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)


@dataclass(frozen=True)
class DecodeStep:
    """What one decode step launches: kernels in order; torch's own, in the graph and outside of it,
    copies to and from the host included."""

    kernels: list[Started]
    torch: list[TorchLaunch]
    outside: list[TorchLaunch]


@contextmanager
def on_card(
    target: GPUTarget, processors: int, kind: type[ListedCard] = ListedCard
) -> Iterator[tuple[ListedCard, list[Started]]]:
    """A card and the list of what is launched on it."""
    old = target.backend == "cuda" and target.arch < 80
    patch = pytest.MonkeyPatch()
    patch.setattr(kernels.gpu, "_interpreted", lambda: True)  # so that CPU tensors will do
    patch.setattr(dense, "wide_sums", lambda device, dtype: True)  # as on a card
    patch.setattr(packing, "_row_slices", lambda n, k: ())  # tensors of the right shapes, unfilled
    with all_launches(target) as listed:
        card = kind(processors, old)
        patch.setattr(kernels.gpu, "tuning_of", lambda device: card.tuning)
        try:
            card.backends, _ = registry.open_backends("cpu", 1, ("gpu", "reference"))
            yield card, listed
        finally:
            patch.undo()


def decode_step(
    card: ListedCard,
    listed: list[Started],
    config: Mapping[str, Any],
    kind: str,
    *,
    prompt: int = 100,
    requests: int = 1,
    max_num_batched_tokens: int = 2048,
) -> DecodeStep:
    """One replayed decode step of requests of that length, in an engine with random weights.

    ``listed``: what :func:`on_card` lists.
    """
    settings = {"max_num_seqs": requests, "max_num_batched_tokens": max_num_batched_tokens}
    outside: list[TorchLaunch] = []
    with _opened(card, config, kind, settings) as (engine, recorder):
        for number in range(requests):
            add(engine, str(number), config["vocab_size"], prompt, 64)
        with TorchLaunches(outside):
            # none is replayed where a request gets a new page, and two are in the first step
            for _ in range(200):
                replays = recorder.replays
                outside.clear()
                listed.clear()
                engine.step()
                if replays > 2 and recorder.replays == replays + 1:
                    return DecodeStep(list(listed), list(recorder.torch), outside)
    raise AssertionError("expected a step with one replayed graph")


@contextmanager
def _opened(
    card: ListedCard, config: Mapping[str, Any], kind: str, settings: Mapping[str, Any]
) -> Iterator[tuple[Engine, _Recorder]]:
    """An engine that records its steps as on a card."""
    recorder, opened = _Recorder(), context.open_backends

    def open_backends(*args: Any, **kwargs: Any) -> Any:
        backends, missing = opened(*args, **kwargs)
        return [_Backend(one, recorder) for one in backends], missing

    short = torch.float16 if card.old else torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "open_backends", open_backends)
        patch.setattr(Buffers, "_memory", staticmethod(_apart))
        patch.setattr(SelfCheck, "_reason", lambda *_: None)  # nothing is computed to be checked
        for module in ("sdk.memory.planning", "sdk.loading.load"):
            patch.setattr(f"{module}.activations_of", lambda config, checkpoint: short)
        loaded = load(
            EngineConfig(
                model="random-weights",
                skip_tokenizer_init=True,
                enable_prefix_caching=False,
                enforce_eager=True,
                max_model_len=2048,
                kv_cache_memory_bytes="4GiB",  # of addresses: nobody writes to them
                **settings,
            ),
            RandomCheckpoint(card, config, kind),
        )
        engine, runner = loaded.engine, loaded.runner
        try:
            recorder.context = runner.ops.context
            recorder.context.card = recorder
            runner.record()
            runner.capture_next()  # a decode step of all requests
            engine.scheduler.pages_ahead, engine.scheduler.batches_in_flight = runner.ahead
            yield engine, recorder
        finally:
            engine.close()
