"""Every architecture recorded as one graph: the same bits as operator by operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.api.params import SamplingParams
from sdk.engine.plan import RequestStart, SequenceSpec, StepRow
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.kv_cache import KVCache, kv_spec
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.step_batch import StepBatch
from sdk.kernels.operators.ops import Ops
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.caches import StateCache
from tests.models.conftest import checkpoint_of, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

PAGE_SIZE, MAX_LEN, TOKENS, REQUESTS = 16, 128, 64, 4


@pytest.fixture(params=["auto", "exact"])
def native(request: pytest.FixtureRequest) -> Iterator[Ops]:
    ops = Ops("cpu", compute=request.param, num_threads=2)
    yield ops
    ops.close()


class Steps:
    """Three requests through one engine's worth of inputs and pages, eager or replayed."""

    def __init__(self, model: Any, ops: Ops, replayed: bool, ranks: int = 1) -> None:
        self.model, self.ops = model, ops
        c = model.config
        spec = kv_spec(c, PAGE_SIZE, "float32", lambda count: count // ranks)
        states = any(isinstance(cache, StateCache) for cache in c.caches)
        self.kv = KVCache(spec, 40, num_states=4 if states else 0)
        self.inputs = StepInputs(TOKENS, REQUESTS, REQUESTS, MAX_LEN, PAGE_SIZE, states=states)
        self.requests = [
            RankRequest(
                RequestStart(
                    SequenceSpec(f"r{i}", SamplingParams()),
                    tuple(prompt(40 + 9 * i, i)),
                    40 + 9 * i,
                    0,
                    tuple(range(1 + 8 * i, 9 + 8 * i)),
                    state_slots=(1 + i,) if states else (),
                )
            )
            for i in range(3)
        ]
        self.graph: Any = None
        if replayed:
            self.graph = ops.recording.capture(
                self.whole, tokens=TOKENS, outputs=REQUESTS, requests=REQUESTS
            )

    def whole(self) -> tuple[Tensor, Tensor]:
        self.ops.find_places(self.inputs.attention_batch)
        hidden = self.model(self.inputs.token_ids, self.inputs.attention_batch, self.kv.layers)
        return hidden, self.model.logits(self.ops.select_rows(hidden, self.inputs.output_rows))

    def run(self, counts: dict[int, int], outputs: list[int]) -> tuple[Tensor, Tensor]:
        running, rows = [self.requests[i] for i in counts], []
        for i, count in counts.items():
            end = sum(row.num_scheduled_tokens for row in rows) + count
            rows.append(StepRow(f"r{i}", count, int(end - 1 in outputs)))
        step = StepBatch(rows, running, range(len(rows)))
        assert step.output_rows == outputs
        tokens = self.inputs.fill(step)
        if self.graph is not None:
            self.graph.replay(tokens=tokens, outputs=len(outputs), requests=len(rows))
            hidden, logits = self.graph.result
        else:
            batch = self.inputs.view(tokens, len(rows))
            self.ops.find_places(batch)
            hidden = self.model(self.inputs.token_ids[:tokens], batch, self.kv.layers)
            chosen = self.ops.select_rows(hidden, self.inputs.output_rows[: len(outputs)])
            logits = self.model.logits(chosen)
        for request, count in zip(running, counts.values(), strict=True):
            request.num_computed += count
        return hidden[:tokens].clone(), logits[: len(outputs)].clone()


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_a_replayed_step_has_the_bits_of_an_eager_one(name: str, native: Ops) -> None:
    checkpoint = checkpoint_of(tiny(name.split("-")[0], **ARCHITECTURES[name]))
    model = build_model(checkpoint, Mesh(), native, max_model_len=MAX_LEN)
    with torch.inference_mode():
        eager, replayed = Steps(model, native, False), Steps(model, native, True)
        steps = [
            ({0: 40, 1: 20}, [39]),
            ({0: 0, 1: 29, 2: 30}, [28]),
            ({2: 28, 1: 0}, [27]),
        ]
        for counts, outputs in steps:
            counts = {i: count for i, count in counts.items() if count}
            expected, found = eager.run(counts, outputs), replayed.run(counts, outputs)
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
            assert expected[1].isfinite().all()


def test_recording_ranks_say_nothing_to_each_other(native: Ops) -> None:
    class Group:
        def all_reduce(self, x: Tensor) -> None:
            raise AssertionError("a recording must not talk to other ranks")

        def all_gather(self, x: Tensor) -> list[Tensor]:
            raise AssertionError("a recording must not talk to other ranks")

    checkpoint = checkpoint_of(tiny("llama"))
    model = build_model(checkpoint, Mesh(0, 2, Group()), native, max_model_len=MAX_LEN)
    with torch.inference_mode():
        steps = Steps(model, native, True, ranks=2)
        with pytest.raises(AssertionError, match="must not talk"):
            steps.run({0: 3}, [2])
