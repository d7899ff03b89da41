"""Engines whose layers with a window give back what has left it: the answers of engines whose
layers keep all tokens, in less memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk import LLM, RequestError, SamplingParams

PROMPTS = [[3 + 7 * i * (k + 1) % 200 for i in range(60 + 40 * k)] for k in range(3)]
ANSWERS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
OPTIONS = {"max_model_len": 256, "dtype": "float32", "num_threads": 1}


@pytest.fixture(scope="module")
def path(golden: Path) -> Path:
    """Five of six layers have a window of 8 tokens."""
    return golden / "arch-gemma3" / "hf"


def turns(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """The answers of two turns of some conversations, and how much was cached in the second."""
    first = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, ANSWERS)]
    more = [[*prompt, *answer, 5, 6] for prompt, answer in zip(PROMPTS, first, strict=True)]
    again = llm.generate(more, ANSWERS)
    answers = first + [list(one.outputs[0].token_ids) for one in again]
    return answers, [one.num_cached_tokens for one in again]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """The answers of an engine whose pages have all layers."""
    with LLM(path, enable_chunked_prefill=False, **OPTIONS) as llm:
        assert not llm.memory_plan.windows
        named = "layers with a window keep all tokens: with enable_chunked_prefill=False"
        assert named in llm.explain()
        return turns(llm)[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 3},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        pytest.param({"speculative_config": {"method": "self"}}, marks=pytest.mark.slow),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_answers_and_hits_are_those_of_pages_with_all_layers(
    path: Path, expected: list[list[int]], options: dict
) -> None:
    with LLM(path, **OPTIONS, **options) as llm:
        [group] = llm.memory_plan.windows
        assert group.window == 8 and "layers with a window of 8" in llm.explain()
        answers, cached = turns(llm)
        assert answers == expected
        # all but the last token of the answer, which did not run
        assert cached == [len(prompt) + 39 for prompt in PROMPTS]


def test_with_little_memory_requests_start_over_and_answer_the_same(
    path: Path, expected: list[list[int]]
) -> None:
    with LLM(path, kv_cache_memory_bytes=1_100_000, max_num_seqs=3, **OPTIONS) as llm:
        assert llm.memory_plan.full_requests < 3
        assert turns(llm)[0] == expected
        before = llm.memory_plan.kv_cache
        llm.resize(llm.memory_plan.total - 3 * llm.memory_plan.page_bytes)
        assert llm.memory_plan.kv_cache == before - 3 * llm.memory_plan.page_bytes
        llm.trim()
        assert turns(llm)[0] == expected


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_policy": "fp16>int8", "block_size": 128}, "kv_policy"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False"),
    ],
)
def test_some_options_keep_all_tokens(path: Path, options: dict, named: str) -> None:
    made = LLM.plan(path, max_model_len=256, **options)
    assert not made.windows and made.page_bytes > 5 * LLM.plan(path).page_bytes
    with LLM(path, max_model_len=256, skip_tokenizer_init=True, **options) as llm:
        assert f"layers with a window keep all tokens: with {named} pages" in llm.explain()


def test_a_context_within_the_window_needs_no_frames(path: Path) -> None:
    wide = LLM.plan(path, max_model_len=256, hf_overrides={"sliding_window": 256})
    assert not wide.windows
    assert LLM.plan(path, max_model_len=256, hf_overrides={"sliding_window": 255}).windows


def test_gemma_3_at_32768_tokens_takes_a_fifth(gemma3: Path) -> None:
    options = {"max_model_len": 32768, "max_num_seqs": 1}
    made = LLM.plan(gemma3, **options)
    assert made.kv_cache <= 115 * 2**20 and made.full_requests == 1
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": 32768}
    assert LLM.plan(gemma3, **options, **whole).kv_cache == 576 * 2**20
    # the least: window and step beside the three layers that keep all tokens
    least = LLM.plan(gemma3, **options, kv_cache_memory_bytes=108 * 2**20)
    assert least.fits
    assert not LLM.plan(gemma3, **options, kv_cache_memory_bytes=107 * 2**20).fits
    many = LLM.plan(gemma3, max_model_len=8192, kv_cache_memory_bytes="2GiB")
    kept = LLM.plan(gemma3, max_model_len=8192, kv_cache_memory_bytes="2GiB", **whole)
    assert many.full_requests > 3.5 * kept.full_requests


def test_a_model_that_only_has_windows_takes_no_pages(path: Path) -> None:
    overrides = {"layer_types": ["sliding_attention"] * 6}
    made = LLM.plan(path, max_model_len=256, hf_overrides=overrides)
    assert made.page_bytes == 0 and made.fits and made.full_requests == made.max_num_seqs
    with LLM(path, hf_overrides=overrides, max_num_seqs=3, **OPTIONS) as llm:
        answers, cached = turns(llm)
        assert cached == [len(prompt) + 39 for prompt in PROMPTS]
        with pytest.raises(RequestError, match="resize: no layer of this model keeps all tokens"):
            llm.resize("1GiB")
    with LLM(path, hf_overrides=overrides, swap_space="1MiB", **OPTIONS) as llm:
        assert turns(llm)[0] == answers
