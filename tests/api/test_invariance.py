"""Same request, same answer: bitwise, on real weights, whatever else the engine is doing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdk import LLM, RequestOutput, SamplingParams

TEXT = (
    "A paged key-value cache stores keys and values of every token in fixed-size pages, so that "
    "requests of very different lengths share one pool of memory without fragmentation. "
) * 4
PARAMS = SamplingParams(
    temperature=0.8, top_p=0.95, seed=7, max_tokens=24, logprobs=3, ignore_eos=True
)


def _facts(output: RequestOutput) -> tuple[object, ...]:
    """Tokens and log-probabilities, exact floats included."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    return (
        tuple(answer.token_ids),
        tuple(
            tuple(sorted((token, value.logprob, value.rank) for token, value in step.items()))
            for step in answer.logprobs
        ),
        answer.cumulative_logprob,
    )


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, max_model_len=1024, max_num_batched_tokens=256) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> tuple[object, ...]:
    llm.reset_prefix_cache()
    [output] = llm.generate(TEXT, PARAMS)
    assert output.num_cached_tokens == 0
    return _facts(output)


@pytest.mark.model
@pytest.mark.parametrize("size", [7, pytest.param(32, marks=pytest.mark.slow)])
def test_in_a_batch(llm: LLM, alone: tuple[object, ...], size: int) -> None:
    llm.reset_prefix_cache()
    others = [f"{number} {TEXT[number * 7 :]}" for number in range(size - 1)]
    middle = size // 2
    outputs = llm.generate([*others[:middle], TEXT, *others[middle:]], PARAMS)
    assert _facts(outputs[middle]) == alone
    assert len({_facts(output)[0] for output in outputs}) > size // 6  # others are other requests


@pytest.mark.model
def test_after_a_prefix_hit(llm: LLM, alone: tuple[object, ...]) -> None:
    llm.reset_prefix_cache()
    llm.generate(TEXT, PARAMS)
    [output] = llm.generate(TEXT, PARAMS)
    assert output.num_cached_tokens is not None and output.num_cached_tokens >= 64
    assert _facts(output) == alone


@pytest.mark.quick_cases(1)
@pytest.mark.model
@pytest.mark.parametrize("budget", [16, 33, 100])
def test_chunked_at_other_places(smollm2: Path, alone: tuple[object, ...], budget: int) -> None:
    with LLM(smollm2, max_model_len=1024, max_num_batched_tokens=budget, max_num_seqs=16) as llm:
        assert _facts(llm.generate(TEXT, PARAMS)[0]) == alone


@pytest.mark.quick_cases(1)
@pytest.mark.model
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_with_other_numbers_of_threads(
    smollm2: Path, alone: tuple[object, ...], threads: int
) -> None:
    with LLM(smollm2, max_model_len=1024, num_threads=threads) as llm:
        assert _facts(llm.generate(TEXT, PARAMS)[0]) == alone


@pytest.mark.slow
@pytest.mark.model
def test_preempted_and_recomputed(smollm2: Path, llm: LLM) -> None:
    params = PARAMS.clone(max_tokens=64)
    llm.reset_prefix_cache()
    alone = _facts(llm.generate(TEXT, params)[0])
    prompts = [f"Request {number}. {TEXT}" for number in range(3)] + [TEXT]
    # Pages for all prompts and one more each, but not for the four that each answer needs.
    tokenizer = llm.get_tokenizer()
    pages = sum(-(-(len(tokenizer.encode(prompt)) + 1) // 16) for prompt in prompts) + len(prompts)
    memory = pages * llm.memory_plan.page_bytes
    with LLM(smollm2, max_model_len=512, kv_cache_memory_bytes=memory) as small:
        outputs = small.generate(prompts, params)
    assert outputs[-1].metrics is not None and outputs[-1].metrics.num_preemptions > 0
    assert _facts(outputs[-1]) == alone
