"""Every arrangement of processes gives the tokens of one process, in every kind of format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.testing import tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
PROMPTS = [
    {"prompt_token_ids": [3 + (seed * 37 + i * 11) % 300 for i in range(length)]}
    for seed, length in enumerate([80, 5, 17, 70])
]
SHAPES: dict[str, dict[str, int]] = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
    "replicas": {"data_parallel_size": 2},
    "ranks and stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "replicas of ranks": {"data_parallel_size": 2, "tensor_parallel_size": 2},
    "replicas of stages": {"data_parallel_size": 2, "pipeline_parallel_size": 2},
    "prompts apart": {"data_parallel_size": 2, "prefill_replicas": 1},
    "prompts apart, with ranks": {
        "data_parallel_size": 2,
        "prefill_replicas": 1,
        "tensor_parallel_size": 2,
    },
    "all": {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
#: A GGUF file, and folders: GPTQ, AWQ, FP8, 16-bit floats.
FORMATS = {
    "gguf": "gguf-Q8_0/model.gguf",
    "gptq": "gptq-v2-w4-g64-asym",
    "awq": "awq-gemm",
    "fp8": "fp8-block",
    "float": "arch-llama3/hf",
}
QUICK = {("replicas of stages", "gguf"), ("ranks and stages", "gptq")}
#: These have all the ways in which a weight is divided.
WITH_ALL_FORMATS = ("ranks and stages", "all")
CASES = [
    pytest.param(shape, name, marks=() if (shape, name) in QUICK else pytest.mark.slow)
    for shape in SHAPES
    for name in (FORMATS if shape in WITH_ALL_FORMATS else ("gguf",))
]


def answers(model: Path, **options: Any) -> list[tuple[list[int], float]]:
    with LLM(model, max_model_len=128, max_num_batched_tokens=32, **options) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("shape", "name"), CASES)
def test_tokens_are_those_of_one_process(golden: Path, shape: str, name: str) -> None:
    """With exact arithmetic. Ranks add in another order than one process, so log-probabilities
    differ in their last bits; stages and replicas change no sum."""
    model, options = golden / FORMATS[name], SHAPES[shape]
    alone = {"max_num_seqs": 8, "compute": "exact"}
    expected, found = answers(model, **alone), answers(model, **alone, **options)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    if "tensor_parallel_size" in options:
        pairs = zip(found, expected, strict=True)
        assert all(abs(mine - known) < 1e-3 for (_, mine), (_, known) in pairs)
    else:
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["replicas of ranks", "prompts apart, with ranks", "all"])
def test_default_arithmetic_has_the_bits_of_the_same_ranks(golden: Path, shape: str) -> None:
    model, ranks = golden / FORMATS["gguf"], {"tensor_parallel_size": 2, "max_num_seqs": 8}
    assert answers(model, **{**ranks, **SHAPES[shape]}) == answers(model, **ranks)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"prefill_replicas": 1}])
def test_replicas_of_ranks_with_whole_experts(tmp_path: Path, more: dict[str, int]) -> None:
    model = tiny_model(tmp_path, "q8_0", "mixtral")
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "max_num_seqs": 8}
    assert answers(model, **ranks, data_parallel_size=2, **more) == answers(model, **ranks)
