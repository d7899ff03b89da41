"""A card that is not here: engines and launchers run as on it, and their launches are listed.

Weights are as large as real ones and hold anything. Steps are recorded and replayed by
``tests/engine/fake_card.py``, so that a decode step launches what a replayed graph of a card would;
nothing is computed, and every token is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from machine_code import Started, all_launches
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from sdk import kernels
from sdk.cli.bench.gpu.card import Card
from sdk.cli.bench.gpu.engine import add
from sdk.cli.bench.gpu.models import RandomCheckpoint
from sdk.config import EngineConfig
from sdk.engine.rank.step_buffers import Buffers
from sdk.kernels import context, graph, registry
from sdk.kernels.gpu import packing, tuning
from sdk.kernels.self_check import SelfCheck
from sdk.loading.load import load
from tests.engine.fake_card import FakeCard, _apart, _Backend

#: What allocates, and starts no kernel.
_NO_LAUNCH = graph._VIEWS | {
    *("aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.is_pinned"),
}


class ListedCard(Card):
    """A card of that name and number of processors; nothing is timed."""

    def __init__(self, processors: int, old: bool) -> None:
        super().__init__({}, rehearsing=True)
        self.tiny = False
        dense_from = kernels.gpu.DENSE_FROM_WITHOUT_MMA if old else tuning.Tuning(1).dense_from
        self.tuning = tuning.Tuning(4 * processors, dense_from=dense_from)

    def size(self, real: int, tiny: int) -> int:
        return real

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8 if high <= 256 else torch.int64)


class _TorchKernels(TorchDispatchMode):
    """Counts torch's operators that start a kernel of a card."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        name = str(func).rpartition(".")[0]
        same = name == "aten.to" and result is args[0]
        self._counted[name] += not (same or name in _NO_LAUNCH)
        return result


class _Recorder(FakeCard):
    """Counts what the graph of each size launches when it is replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()
        self._sampled = torch.zeros(256, 3, dtype=torch.float64)

    def end(self) -> Any:
        graph = super().end()
        replay = graph.replay

        def counted() -> None:
            self.torch.clear()
            with _TorchKernels(self.torch):
                replay()

        graph.replay = counted
        return graph

    def sample(self, kernel: Any, logits: Tensor, *given: Any) -> Tensor:
        """Without the copy of the result that a :class:`FakeCard` needs."""
        self.launch(kernel.rows, logits, *given)
        return self._sampled[: len(logits)]


@dataclass(frozen=True)
class DecodeStep:
    """What one decode step launches: kernels in order; torch's own by name, in the graph and
    outside of it, copies to and from the host included."""

    kernels: list[Started]
    torch: Counter[str]
    outside: Counter[str]


@contextmanager
def on_card(target: GPUTarget, processors: int) -> Iterator[tuple[ListedCard, list[Started]]]:
    """A card and the list of what is launched on it."""
    old = target.backend == "cuda" and target.arch < 80
    patch = pytest.MonkeyPatch()
    patch.setattr(kernels.gpu, "_interpreted", lambda: True)  # so that CPU tensors will do
    patch.setattr(packing, "_row_slices", lambda n, k: ())  # tensors of the right shapes, unfilled
    with all_launches(target) as listed:
        card = ListedCard(processors, old)
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
    context_tokens: int = 100,
    **options: Any,
) -> DecodeStep:
    """One replayed decode step of one request, in an engine with these random weights."""
    recorder, opened = _Recorder(), context.open_backends

    def open_backends(*args: Any, **kwargs: Any) -> Any:
        backends, missing = opened(*args, **kwargs)
        return [_Backend(one, recorder) for one in backends], missing

    short = torch.float16 if card.tuning.dense_from == 32 else torch.bfloat16
    settings = {"max_model_len": 2048, "max_num_seqs": 1, "max_num_batched_tokens": 128, **options}
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
                kv_cache_memory_bytes="64MiB",
                **settings,
            ),
            RandomCheckpoint(card, config, kind),
        )
        engine, runner = loaded.engine, loaded.runner
        try:
            recorder.ops = runner.ops
            runner.record()
            engine.scheduler.pages_ahead, engine.scheduler.batches_in_flight = runner.ahead
            add(engine, "listed", config["vocab_size"], context_tokens, 64)
            for _ in range(4):
                engine.step()
            replays = recorder.replays
            listed.clear()
            both: Counter[str] = Counter()
            with _TorchKernels(both):
                engine.step()
            assert recorder.replays == replays + 1, "expected one replayed graph in a step"
            return DecodeStep(list(listed), +recorder.torch, both - recorder.torch)
        finally:
            engine.close()
