"""Tiered KV pages in the swap space: they come back with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sdk import LLM, MemoryPool, RequestOutput, SamplingParams
from sdk.api.sizes import format_bytes
from sdk.requests.driving import step_sizes

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=60, logprobs=2, ignore_eos=True)
EXACT = PARAMS.clone(kv_min_bits=16)
#: Each takes 9 pages, and 10 with its answer; all of them 80, in 44 that can be had.
PROMPTS = [[3 + (7 + j) * i % 400 for i in range(1140)] for j in range(8)]
OPTIONS = {
    "max_model_len": 2048,
    "hf_overrides": {"max_position_embeddings": 2048},
    "kv_policy": "fp16>int8>int4",
    "max_num_seqs": 8,
}


@pytest.fixture(autouse=True, scope="module")
def steps_of_any_duration() -> Iterator[None]:
    """A slow machine would cut prompts into smaller chunks next to requests that decode. Which
    pages are full, and so move to a lower tier, would then depend on the time a step takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_sizes, "MIXED_STEP_S", 1e6)
        yield


def _facts(output: RequestOutput) -> tuple[object, ...]:
    """Tokens and log-probabilities, exact floats included."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    steps = [sorted((t, x.logprob) for t, x in step.items()) for step in answer.logprobs]
    return tuple(answer.token_ids), steps


def _page_bytes(path: Path) -> int:
    return LLM.plan(path, **OPTIONS).page_bytes


def _with_pages(path: Path, pages: int, swap: int = 0, **options: object) -> LLM:
    size = _page_bytes(path)
    given = {**OPTIONS, "swap_space": swap * size, **options}
    return LLM(path, **given, kv_cache_memory_bytes=pages * size)


def _one(llm: LLM, number: int, params: SamplingParams = PARAMS) -> RequestOutput:
    [output] = llm.generate([PROMPTS[number]], params)
    return output


@pytest.fixture(scope="module")
def lowered(tiny_path: Path) -> tuple[tuple[object, ...], list[np.ndarray]]:
    """The answer to the last prompt from tiered pages that stayed where they were, and what
    is in them."""
    with _with_pages(tiny_path, 44) as llm:
        llm.generate(PROMPTS, PARAMS)
        output, kept = _one(llm, 7), llm.snapshot(PROMPTS[7])
        assert output.num_cached_tokens == 1024
        assert llm.get_metrics()["num_pages_4bit"] > 0
    return _facts(output), [layer.rows for layer in kept.kv.layers]


@pytest.fixture(scope="module")
def exact(tiny_path: Path) -> list[tuple[object, ...]]:
    """Every answer from pages that never went down."""
    with _with_pages(tiny_path, 81) as llm:
        return [_facts(output) for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("where", ["memory", "file"])
def test_what_comes_back_answers_with_the_bits_of_what_had_stayed(
    tiny_path: Path,
    tmp_path: Path,
    lowered: tuple[tuple[object, ...], list[np.ndarray]],
    where: str,
) -> None:
    answer, rows = lowered
    swap = {"swap_path": tmp_path} if where == "file" else {}
    with _with_pages(tiny_path, 44, 100, **swap) as llm:
        llm.generate(PROMPTS, PARAMS)
        here = llm.get_metrics()
        llm.trim()
        there = llm.get_metrics()
        for bits in (16, 8, 4):
            cached = here[f"num_pages_{bits}bit"]
            assert there[f"swap_pages_{bits}bit"] >= cached > 0
        assert there["swapped_out"] > there["swap_pages_used"]  # smaller ones share a slot
        output = _one(llm, 7)
        assert output.num_cached_tokens == 1024
        assert llm.get_metrics()["swapped_in"] == 8
        assert _facts(output) == answer
        assert output.metrics is not None
        events = [one for one in output.metrics.events if one.kind not in ("admitted", "prefill")]
        assert {event.kind for event in events} == {"swapped_in"}
        assert sum(event.num_pages for event in events) == 8
        assert {event.kv_bits for event in events} > {16}
        llm.trim()
        kept = llm.snapshot(PROMPTS[7])
        assert all(map(np.array_equal, rows, (layer.rows for layer in kept.kv.layers)))


@pytest.mark.slow
def test_an_answer_with_a_floor_is_the_bits_of_pages_that_never_went_down(
    tiny_path: Path, exact: list[tuple[object, ...]]
) -> None:
    """Whatever lies in either tier."""
    with _with_pages(tiny_path, 44, 100) as llm:
        llm.generate(PROMPTS, PARAMS)
        llm.trim()
        output = _one(llm, 7, EXACT)
        assert 0 < output.num_cached_tokens < 1024
        assert _facts(output) == exact[7]
    with _with_pages(tiny_path, 23, 100) as llm:
        llm.generate(PROMPTS, PARAMS)
        outputs = llm.generate(PROMPTS, EXACT)
        assert [_facts(output) for output in outputs] == exact


@pytest.mark.slow
def test_requests_that_were_preempted_go_on_with_their_lowered_pages(tiny_path: Path) -> None:
    """Those with a floor with the same bits as alone."""
    prompts = [prompt[:100] for prompt in PROMPTS]
    params = [(EXACT if i in (0, 4) else PARAMS).clone(max_tokens=600) for i in range(8)]
    with _with_pages(tiny_path, 60) as llm:
        alone = [_facts(output) for output in llm.generate(prompts[::4], params[::4])]
    with _with_pages(tiny_path, 17, 40) as llm:
        outputs = llm.generate(prompts, params)
        metrics = llm.get_metrics()
    assert [_facts(output) for output in outputs[::4]] == alone
    events = [event for one in outputs if one.metrics for event in one.metrics.events]
    memory = {"preempted", "resumed", "recoded", "swapped_in"}
    assert {event.kind for event in events} == {"admitted", "prefill", *memory}
    assert {event.kv_bits for event in events if event.kind == "swapped_in"} & {8, 4}
    assert all(len(output.outputs[0].token_ids) == 600 for output in outputs)
    assert metrics["swapped_in"] > 0 and metrics["swap_pages_4bit"] > 0


def test_a_swap_space_for_two_pages_holds_eight_and_loses_the_oldest(
    tiny_path: Path, exact: list[tuple[object, ...]]
) -> None:
    with _with_pages(tiny_path, 20, 2) as llm:
        for number in range(8):
            _one(llm, number)
        metrics = llm.get_metrics()
        assert metrics["swap_pages"] == metrics["swap_pages_used"] == 2
        assert metrics["swap_pages_4bit"] == 8 < metrics["swapped_out"]
        assert _facts(_one(llm, 0, EXACT)) == exact[0]


@pytest.mark.slow
def test_two_ranks_swap_the_same_lowered_pages(tiny_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers = []
    for ranks in (1, 2):
        options = {"tensor_parallel_size": ranks, "compute": "exact"}
        with _with_pages(tiny_path, 44, 100, **options) as llm:
            llm.generate(PROMPTS, greedy)
            llm.trim()
            outputs = llm.generate(PROMPTS, greedy)
            answers.append([output.outputs[0].token_ids for output in outputs])
            metrics = llm.get_metrics()
            assert metrics["swapped_in"] > 30 and metrics["swap_pages_4bit"] > 0
    assert answers[0] == answers[1]


def test_resized_and_asleep_with_both(
    tiny_path: Path,
    lowered: tuple[tuple[object, ...], list[np.ndarray]],
    exact: list[tuple[object, ...]],
) -> None:
    with _with_pages(tiny_path, 44, 100) as llm:
        llm.generate(PROMPTS, PARAMS)
        plan = llm.memory_plan
        llm.resize(plan.total - 30 * plan.page_bytes)
        assert llm.get_metrics()["num_pages"] <= 14
        llm.resize(plan.total)
        output = _one(llm, 7)
        assert output.num_cached_tokens == 1024 and _facts(output) == lowered[0]
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert llm.get_metrics()["swap_pages_used"] == 0
            output = _one(llm, 7, EXACT)
            assert output.num_cached_tokens == 0 and _facts(output) == exact[7]
        llm.trim()
        assert llm.get_metrics()["swap_pages_16bit"] >= 8
        assert _one(llm, 7, EXACT).num_cached_tokens == 1024


def test_pages_that_another_model_of_a_pool_takes_come_back(
    tiny_path: Path, lowered: tuple[tuple[object, ...], list[np.ndarray]]
) -> None:
    size = _page_bytes(tiny_path)
    plan = LLM.plan(tiny_path, **OPTIONS, kv_cache_memory_bytes=16 * size)
    pool = MemoryPool(plan.total + 28 * size)
    with LLM(tiny_path, **OPTIONS, memory=pool, swap_space=100 * size) as llm:
        assert llm.get_metrics()["num_pages"] == 16
        llm.generate(PROMPTS, PARAMS)
        assert llm.get_metrics()["num_pages"] == 44
        taken = pool.lease("other", 28 * size)
        assert llm.get_metrics()["num_pages"] == 16
        assert llm.get_metrics()["swapped_out"] > 0
        taken.close()
        output = _one(llm, 7)
        assert output.num_cached_tokens == 1024 and _facts(output) == lowered[0]


def test_a_plan_says_what_the_swap_space_holds(tiny_path: Path) -> None:
    size = _page_bytes(tiny_path)
    without = LLM.plan(tiny_path, **OPTIONS, kv_cache_memory_bytes=20 * size)
    plan = LLM.plan(
        tiny_path, **OPTIONS, kv_cache_memory_bytes=20 * size, swap_space=7 * size + size // 2
    )
    assert (plan.total, plan.swap_pages, without.swap_pages) == (without.total, 7, 0)
    row = f"{format_bytes(7 * size)}  not part of the total: 7 pages of float16, 28 of int4"
    assert row in str(plan) and "swap space" not in str(without)
    with LLM(plan=plan) as llm:
        assert llm.get_metrics()["swap_pages"] == 7
