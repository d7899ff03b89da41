"""A KV cache that loses precision before it loses pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk import LLM, RequestError, RequestOutput, SamplingParams

LADDER = "fp16>int8>int4"
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=60, logprobs=2, ignore_eos=True)
EXACT = PARAMS.clone(kv_min_bits=16)
#: Each takes 9 pages, and 10 with its answer.
PROMPTS = [[3 + (7 + j) * i % 400 for i in range(1140)] for j in range(8)]
OPTIONS = {"max_model_len": 2048, "hf_overrides": {"max_position_embeddings": 2048}}


def _facts(output: RequestOutput) -> tuple[object, ...]:
    """Tokens and log-probabilities, exact floats included."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    steps = [sorted((t, x.logprob) for t, x in step.items()) for step in answer.logprobs]
    return tuple(answer.token_ids), steps


def _with_pages(path: Path, pages: int, **options: object) -> LLM:
    options = {**OPTIONS, "kv_policy": LADDER, "max_num_seqs": 8, **options}
    page_bytes = LLM.plan(path, **options).page_bytes
    return LLM(path, **options, kv_cache_memory_bytes=pages * page_bytes)


@pytest.fixture(scope="module")
def roomy(tiny_path: Path) -> list[tuple[object, ...]]:
    """Every answer from pages that never went down."""
    with _with_pages(tiny_path, 81) as llm:
        answers = [_facts(output) for output in llm.generate(PROMPTS, PARAMS)]
        assert llm.get_metrics()["num_pages_lowered"] == 0
        assert llm.memory_plan.kv_dtype == "float16>int8>int4"
    return answers


@pytest.mark.parametrize("eager", [False, True])
def test_requests_that_need_1_8_times_the_pages_run_together(
    tiny_path: Path, roomy: list[tuple[object, ...]], eager: bool
) -> None:
    """80 pages in 44; the one with a floor answers as if it were alone."""
    with _with_pages(tiny_path, 44, enforce_eager=eager) as llm:
        params = [EXACT if i == 5 else PARAMS for i in range(8)]
        outputs = llm.generate(PROMPTS, params)
        metrics = llm.get_metrics()
    seen = [output.metrics for output in outputs if output.metrics is not None]
    assert len(seen) == 8 and not any(one.num_preemptions for one in seen)
    assert max(one.first_token_ts for one in seen) < min(one.last_token_ts for one in seen)
    answers = [_facts(output) for output in outputs]
    assert answers[5] == roomy[5]
    assert answers != roomy
    assert metrics["num_pages_lowered"] > 36
    assert metrics["num_pages_8bit"] + metrics["num_pages_4bit"] > 36


def test_pages_that_went_down_serve_as_prefixes_but_not_below_a_floor(tiny_path: Path) -> None:
    with _with_pages(tiny_path, 44) as llm:
        llm.generate(PROMPTS, PARAMS)
        [again] = llm.generate([PROMPTS[7]], PARAMS)
        assert again.num_cached_tokens == 1024
        [exact] = llm.generate([PROMPTS[7]], EXACT)
        assert exact.num_cached_tokens is not None and exact.num_cached_tokens < 1024


def test_two_ranks_take_the_same_pages_down(tiny_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    answers = []
    for ranks in (1, 2):
        with _with_pages(tiny_path, 44, tensor_parallel_size=ranks, compute="exact") as llm:
            outputs = llm.generate(PROMPTS, greedy)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert llm.get_metrics()["num_pages_lowered"] > 30
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_policy": "int8>fp16"}, "expected fp16>int8>int4, fp16>int8 or int8>int4, found"),
        ({"kv_policy": "fp16"}, "kv_policy: expected"),
        ({"kv_policy": LADDER, "kv_cache_dtype": "int8"}, "expected kv_cache_dtype='auto' beside"),
        ({"kv_policy": LADDER, "swap_space": "1MiB"}, "expected swap_space=0 beside it"),
        ({"kv_policy": LADDER, "block_size": 64}, "expected block_size=128, found 64"),
        ({"kv_policy": LADDER, "device": "cuda"}, "on a GPU pages keep their type"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tiny_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(tiny_path, **options)


def test_what_cannot_be_kept_is_refused_and_others_go_on(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=256, kv_policy="int8>int4") as llm:
        with pytest.raises(RequestError, match="kv_min_bits=16: the KV cache has 8 bits"):
            llm.generate([[1, 2, 3]], EXACT)
        with pytest.raises(RequestError, match="snapshots have one type"):
            llm.snapshot([5] * 200)
        assert llm.generate([[1, 2, 3]], PARAMS)[0].finished
    with pytest.raises(RequestError, match="kv_min_bits"):
        SamplingParams(kv_min_bits=12)
