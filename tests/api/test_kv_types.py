"""Every type of keys and values through the whole engine: same answers, fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sdk import LLM, RequestOutput, SamplingParams
from sdk.kernels.kv.kv_types import KV_TYPES

TYPES = (
    *("float32", "bfloat16", "int16", "int8", "fp8", "fp8_e5m2", "int4", "k8v4", "int16/int8"),
    *("int4:skip=1", "int16:skip=0"),
)
#: Of one token in float16: two layers, keys and values of 2 heads of 64.
HALF = 2 * 2 * 2 * 64 * 2
PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, logprobs=2, ignore_eos=True)
PROMPT = [3 + 7 * i % 400 for i in range(50)]


def _facts(output: RequestOutput) -> tuple[object, ...]:
    """Tokens and log-probabilities, exact floats included."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    steps = [sorted((t, x.logprob) for t, x in step.items()) for step in answer.logprobs]
    return tuple(answer.token_ids), steps


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("dtype", TYPES)
def test_an_answer_is_the_same_alone_cached_chunked_and_preempted(
    tiny_path: Path, dtype: str
) -> None:
    others = [[5 + (i * j) % 300 for i in range(40)] for j in range(1, 4)]
    options = {"max_model_len": 128, "kv_cache_dtype": dtype}
    with LLM(tiny_path, **options) as llm:
        [first] = llm.generate([PROMPT], PARAMS)
        alone = _facts(first)
        [hit] = llm.generate([PROMPT], PARAMS)
        assert hit.num_cached_tokens == 48 and _facts(hit) == alone
        llm.reset_prefix_cache()
        assert _facts(llm.generate([*others, PROMPT], PARAMS)[-1]) == alone
        page_bytes = llm.memory_plan.page_bytes
        assert llm.memory_plan.kv_dtype == dtype
    options["kv_cache_memory_bytes"] = 8 * page_bytes  # for one and a half of the answers
    with LLM(tiny_path, max_num_batched_tokens=17, max_num_seqs=4, **options) as small:
        output = small.generate([others[0], PROMPT, *others[1:]], PARAMS)[1]
        assert output.metrics is not None and output.metrics.num_preemptions > 0
        assert _facts(output) == alone


@pytest.mark.parametrize(
    ("dtype", "least"),
    [
        ("int16", 0.98),
        ("int8", 1.9),
        ("fp8", 1.9),
        ("int4", 3.6),
        ("k8v4", 2.5),
        ("int4:skip=0", 1.5),
    ],
)
def test_a_budget_holds_as_many_more_tokens_as_they_are_smaller(
    tiny_path: Path, dtype: str, least: float
) -> None:
    options = {"max_model_len": 128, "max_num_seqs": 256, "kv_cache_memory_bytes": "2MiB"}
    half = LLM.plan(tiny_path, kv_cache_dtype="float16", **options)
    plan = LLM.plan(tiny_path, kv_cache_dtype=dtype, **options)
    assert half.page_bytes == 16 * HALF
    assert plan.num_pages >= least * half.num_pages
    assert dtype in str(plan)


@pytest.mark.slow
def test_two_ranks_share_the_heads_of_four_bit_pages(tiny_path: Path) -> None:
    options = {"max_model_len": 128, "kv_cache_dtype": "k8v4", "compute": "exact"}
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for ranks in (1, 2):
        with LLM(tiny_path, tensor_parallel_size=ranks, **options) as llm:
            [output] = llm.generate([PROMPT], greedy)
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_the_reference_kernels_run_a_type_that_no_fast_backend_knows(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = replace(KV_TYPES["int4"], name="int2", short="2", bits=2, largest=3.0, cpu_element=None)
    monkeypatch.setattr("sdk.quant.spec.KV_TYPES", {**KV_TYPES, toy.name: toy})
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    sizes = {}
    for name in ("int2", "int8/int2", "int4"):
        with LLM(tiny_path, kv_cache_dtype=name, max_model_len=128) as llm:
            snapshot = llm.snapshot(PROMPT)
            [output] = llm.generate([PROMPT], params)
            assert len(output.outputs[0].token_ids) == 4 and output.num_cached_tokens == 49
            llm.reset_prefix_cache()
            llm.restore(snapshot)
            [again] = llm.generate([PROMPT], params)
            assert again.outputs[0].token_ids == output.outputs[0].token_ids
            assert again.num_cached_tokens == 48
            text = llm.explain()
            sizes[name] = llm.memory_plan.page_bytes
        known = f"KV pages of int2: expected {', '.join(KV_TYPES)}"
        assert (known in text) == ("int2" in name)
        assert ("reference.attention" in text) == ("int2" in name)
    assert sizes["int2"] < sizes["int4"] < sizes["int8/int2"]
