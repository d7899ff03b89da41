"""Each row of a step reaches the adapter it asks for, in every product, whoever runs beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk import LLM, SamplingParams
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling.drafts import Drafter, Drafts
from sdk.models.adapters import ModelAdapters
from sdk.models.projections import Projection
from sdk.quant.adapter import Adapter, LowRank

PROMPTS = [[5, 9, 30, 31, 200, 17, 8, 8, 1], [44, 8], [7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
SLOTS = [1, -1, 0, 1]
PARAMS = SamplingParams(temperature=0.8, seed=2, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
OPTIONS: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 8, "max_num_seqs": 4}


class RankOne:
    """``y[t] += (x[t] . a[slot]) b[slot]``, row by row: bits that do not depend on the batch."""

    def __init__(self, seed: int, width: int, out: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.a = torch.randn(2, width, generator=generator) / width**0.5
        self.b = torch.randn(2, out, generator=generator) * 0.7
        self.rows = 0

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        assert slots.shape == x.shape[:1] and slots.dtype == torch.int32
        self.rows += int((slots >= 0).sum())
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                y[row] += (x[row] * self.a[slot]).sum() * self.b[slot]


def adapted(llm: LLM) -> list[RankOne]:
    """Put adapters on all of a model's products."""
    made = []
    for seed, (_, linear) in enumerate(llm._runner().model.linears()):
        assert isinstance(linear, Projection)
        out, width = linear.weight.shape
        linear.adapters = RankOne(seed, width, out)
        made.append(linear.adapters)
    return made


def answers(llm: LLM, indices: list[int], slots: list[int] | None = None) -> list[Any]:
    """Tokens and the scores of the prompts, of requests that run together."""
    engine = llm._driver._engine
    for index in indices:
        engine.add(Job(SequenceSpec(str(index), PARAMS), tuple(PROMPTS[index])))
        request = engine.scheduler.queues.unfinished[str(index)]
        request.adapter_slot = (slots or SLOTS)[index]
        request.adapter = str(request.adapter_slot)  # prefixes are kept apart by it
    found: dict[str, Any] = {}
    while engine.has_unfinished:
        found |= {output.request_id: output for output in engine.step()}
    scored = [[x and dict(x) for x in found[str(i)].prompt_logprobs] for i in indices]
    return [(found[str(i)].outputs[0].token_ids, x) for i, x in zip(indices, scored, strict=True)]


@pytest.fixture
def path(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


def test_a_request_with_an_adapter_is_answered_as_if_it_ran_alone(path: Path) -> None:
    with LLM(path, enforce_eager=True, **OPTIONS) as llm:
        base = answers(llm, [0, 1, 2, 3], [-1] * 4)
        made = adapted(llm)
        llm.reset_prefix_cache()
        alone = [answers(llm, [index])[0] for index in range(4)]
        llm.reset_prefix_cache()
        assert answers(llm, [0, 1, 2, 3]) == alone
        assert all(one.rows for one in made)  # the head's too
        assert alone[1] == base[1]
        assert all(alone[i][0] != base[i][0] and alone[i][1] != base[i][1] for i in (0, 2, 3))
        llm.reset_prefix_cache()
        other = answers(llm, [0, 3], [0, -1, 0, 0])
        assert other[0][0] != alone[0][0] and other[1][0] != alone[3][0]


def test_drafts_run_with_the_adapter_of_their_request(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.loading import load as loading

    config = loading._runner_config
    monkeypatch.setattr(loading, "_runner_config", lambda *args: _with_drafts(config(*args)))

    class Known(Drafter):
        def propose(self, request: Any, most: int) -> Any:
            tokens = alone[int(request.request_id)][0]
            return tokens[request.num_output_tokens :][:most]

    with LLM(path, enforce_eager=True, **OPTIONS | {"max_num_batched_tokens": 32}) as llm:
        adapted(llm)
        alone = [answers(llm, [index])[0] for index in range(4)]
        llm.reset_prefix_cache()
        scheduler = llm._driver._engine.scheduler
        scheduler.drafts = Drafts(Known(), 3)
        assert answers(llm, [0, 1, 2, 3]) == alone
        assert scheduler.committer.num_accepted_tokens == scheduler.committer.num_draft_tokens > 20


def _with_drafts(config: Any) -> Any:
    from dataclasses import replace

    return replace(config, max_draft_tokens=12)


def test_without_adapters_a_slot_changes_nothing(path: Path) -> None:
    with LLM(path, **OPTIONS) as llm:
        assert llm._runner().strategy.eager_reason is None  # recorded
        base = answers(llm, [0, 1, 2, 3], [-1] * 4)
        llm.reset_prefix_cache()
        assert answers(llm, [0, 1, 2, 3]) == base


def low_rank(adapters: ModelAdapters, seed: int) -> Adapter:
    """Random factors for every matrix, under its own name."""
    generator = torch.Generator().manual_seed(seed)

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    return Adapter(
        str(seed),
        {
            path: LowRank(random(4, inputs), random(out, 4))
            if path != "model.embed_tokens"
            else LowRank(random(4, inputs) * 0.2, random(out, 4))
            for path, (out, inputs) in adapters.matrices.items()
            if not path.endswith(("qkv_proj", "gate_up_proj"))
        },
    )


@pytest.mark.parametrize("eager", [False, True])
def test_adapters_come_and_go_while_the_recorded_step_stays(path: Path, eager: bool) -> None:
    with LLM(path, enforce_eager=True, **OPTIONS) as llm:
        base = answers(llm, [0, 1, 2, 3], [-1] * 4)
        runner = llm._runner()
        adapters = ModelAdapters(runner.model, runner.ops, 2)
        if not eager:
            runner.record()
            assert runner.strategy.eager_reason is None
        found = {}
        for first, second in ((1, 2), (3, 1), (0, 3)):
            for slot, seed in enumerate((first, second)):
                if seed:
                    adapters.write(slot, adapters.pack(low_rank(adapters, seed)))
                else:
                    adapters.clear(slot)
            llm.reset_prefix_cache()
            together = answers(llm, [0, 1, 2, 3])
            seeds = [second, -1, first, second]  # SLOTS
            for index, seed in enumerate(seeds):
                llm.reset_prefix_cache()
                assert answers(llm, [index]) == [together[index]]
                wanted = found.setdefault((index, seed), together[index])
                assert together[index] == wanted
                assert (together[index] == base[index]) == (seed in (-1, 0))
