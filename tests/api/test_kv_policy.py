"""A KV cache that loses precision before it loses pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk import LLM, RequestError, RequestOutput, SamplingParams

TIERS = "fp16>int8>int4"
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


def _distance(output: RequestOutput, other: RequestOutput) -> float:
    """How far the log-probabilities of the first token are apart, at most."""
    ours, theirs = (one.outputs[0].logprobs for one in (output, other))
    assert ours is not None and theirs is not None
    shared = ours[0].keys() & theirs[0].keys()
    assert shared
    return max(abs(ours[0][token].logprob - theirs[0][token].logprob) for token in shared)


def _with_pages(path: Path, pages: int, **options: object) -> LLM:
    options = {**OPTIONS, "kv_policy": TIERS, "max_num_seqs": 8, **options}
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


@pytest.mark.quick_cases(1)
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


@pytest.mark.slow
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
        ({"kv_policy": TIERS, "kv_cache_dtype": "int8"}, "expected kv_cache_dtype='auto' with it"),
        ({"kv_policy": TIERS, "block_size": 64}, "expected block_size=128, found 64"),
        ({"kv_policy": TIERS, "device": "cuda"}, "kv_policy: not supported on a GPU"),
        ({"kv_policy": TIERS, "kv_keep": 2}, "kv_keep: expected two numbers of pages, found 2"),
        ({"kv_policy": TIERS, "kv_keep": (1, -1)}, r"of at least 0, found \(1, -1\)"),
        ({"kv_keep": (1, 1)}, r"kv_keep=\(1, 1\) needs a kv_policy"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tiny_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(tiny_path, **options)


def test_what_would_fit_in_the_place_of_a_policy_has_nothing_to_keep(tiny_path: Path) -> None:
    options = {**OPTIONS, "kv_policy": TIERS, "kv_keep": (2, 2), "max_model_len": 2048}
    found = LLM.plan(tiny_path, **options, kv_cache_memory_bytes="300KiB").alternatives
    assert any(one.options.get("kv_cache_dtype") == "int8" for one in found)
    for one in found:
        assert ("kv_cache_dtype" in one.options) == (one.options.get("kv_keep") == (1, 0))


def test_what_cannot_be_kept_is_refused_and_others_go_on(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=256, kv_policy="int8>int4") as llm:
        with pytest.raises(RequestError, match="kv_min_bits=16: the KV cache has 8 bits"):
            llm.generate([[1, 2, 3]], EXACT)
        assert llm.generate([[1, 2, 3]], PARAMS)[0].finished
    with pytest.raises(RequestError, match="kv_min_bits"):
        SamplingParams(kv_min_bits=12)


def test_an_answer_after_a_restore_from_pages_of_codes_is_the_same_bits(
    tiny_path: Path, tmp_path: Path
) -> None:
    with _with_pages(tiny_path, 21, kv_policy="int8>int4") as llm:
        [alone] = llm.generate(PROMPTS[:1], PARAMS)
        snapshot = llm.snapshot(PROMPTS[0])
        snapshot.save(tmp_path / "prompt.kv")
        assert snapshot.kv.spec.dtype == "int8" and snapshot.num_tokens == 1024
    with _with_pages(tiny_path, 21, kv_policy="int8>int4") as llm:
        assert llm.restore(tmp_path / "prompt.kv") == 1024
        [output] = llm.generate(PROMPTS[:1], PARAMS)
        assert output.num_cached_tokens == 1024 and _facts(output) == _facts(alone)


def test_pages_of_several_types_leave_as_the_best_of_them(tiny_path: Path, tmp_path: Path) -> None:
    """And come back in any cache: tiered, float16 or int8."""
    with _with_pages(tiny_path, 44) as llm:
        llm.generate(PROMPTS, PARAMS)
        [known] = llm.generate(PROMPTS[7:], PARAMS)
        assert known.num_cached_tokens == 1024
        assert llm.get_metrics()["num_pages_4bit"] > 0
        snapshot = llm.snapshot(PROMPTS[7])
        assert snapshot.kv.spec.dtype == "float16"  # the first page stays as it is
        snapshot.save(tmp_path / "prompt.kv")
    plain = {"kv_policy": None}
    for pages, options in ((21, {}), (170, plain), (170, {**plain, "kv_cache_dtype": "int8"})):
        with _with_pages(tiny_path, pages, **options) as llm:
            assert llm.restore(tmp_path / "prompt.kv") == 1024
            [output] = llm.generate(PROMPTS[7:], PARAMS)
            assert output.num_cached_tokens == 1024
            assert _distance(output, known) < 0.1


def test_pages_go_down_for_a_restored_prefix(
    tiny_path: Path, tmp_path: Path, roomy: list[tuple[object, ...]]
) -> None:
    """The moves are made before the prefix is written; all other pages hold what they held."""
    with _with_pages(tiny_path, 21) as llm:
        [alone] = llm.generate(PROMPTS[:1], PARAMS)
        llm.snapshot(PROMPTS[0]).save(tmp_path / "prompt.kv")
    with _with_pages(tiny_path, 19) as llm:
        llm.generate(PROMPTS[1:3], PARAMS)
        before = llm.get_metrics()["num_pages_lowered"]
        assert llm.restore(tmp_path / "prompt.kv", pin=True) == 1024
        assert llm.get_metrics()["num_pages_lowered"] > before
        outputs = llm.generate(PROMPTS[:3], EXACT)
        assert outputs[0].num_cached_tokens == 1024
        assert _distance(outputs[0], alone) < 0.1
        assert [_facts(output) for output in outputs[1:]] == roomy[1:3]
