"""``LLM.plan`` and ``LLM`` refuse the same, before a weight is read; their advice works."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, MemoryPlan, OutOfMemoryError, SamplingParams, SdkError

#: Options and values that matter to each other; a fixed sample of the combinations is tried.
CHOICES: dict[str, list[Any]] = {
    "max_num_batched_tokens": [8, 16, 512],
    "max_num_seqs": [4, 16],
    "enable_chunked_prefill": [False],
    "max_model_len": [16, 200, 10**6],
    "memory": ["1MiB", "26MiB", "200MiB", "900TiB"],
    "kv_cache_memory_bytes": [1000, "1MiB"],
    "kv_cache_dtype": ["int4", "int4:skip=1", "int8:skip=7"],
    "swap_space": [4, "2KiB", "1MiB"],
    "enable_prefix_caching": [False],
    "tensor_parallel_size": [5],
    "quantization": ["int4"],
    "generation_config": ["vllm", "/nowhere"],
    "load_format": ["gguf", "safetensors"],
    "skip_tokenizer_init": [True],
}
COMBINATIONS = 60
#: What does not depend on other options, one by one.
ALONE = [
    {"max_num_batched_tokens": 16},
    {"swap_space": "900TiB"},
    {"swap_space": "900TiB", "swap_path": "/tmp"},
    {"swap_space": "1MiB", "swap_path": "/nowhere"},
    {"disk_offload": "1MiB", "disk_offload_path": "/nowhere"},
    {"disk_offload": "1MiB", "disk_offload_path": "/dev/shm"},
    {"tokenizer": "/tmp"},
    {"generation_config": "/tmp"},
    {"override_generation_config": {"top_p": 3}},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
    {"memory": "900TiB"},
    {"tensor_parallel_size": 5},
    {"device": "cuda"},
    {"kv_policy": "fp16>int8", "block_size": 32},
]


def sampled() -> list[dict[str, Any]]:
    rng = random.Random(7)
    return [
        {name: rng.choice(CHOICES[name]) for name in rng.sample(sorted(CHOICES), 4)}
        for _ in range(COMBINATIONS)
    ]


def outcome(call: Any, path: Path, options: dict[str, Any]) -> str:
    """``fits``, or what was refused without numbers that change from moment to moment."""
    try:
        made = call(path, **options)
    except SdkError as error:
        return _steady(f"{type(error).__name__}: {error}")
    if isinstance(made, MemoryPlan):
        return "fits" if made.fits else _steady(f"OutOfMemoryError: {made.problem}")
    made.close()
    return "fits"


def _steady(text: str) -> str:
    head = text.partition("what would help")[0]
    return re.sub(r"(available|this machine has left|are free).*|[\d.]+ \w?i?B", "", head)


@pytest.mark.parametrize("options", [*ALONE, *sampled()], ids=lambda options: None)
def test_a_plan_and_a_load_agree_and_a_refusal_comes_before_loading(
    tiny_path: Path, options: dict[str, Any]
) -> None:
    loaded: list[str] = []
    planned = outcome(LLM.plan, tiny_path, options)
    progress = {"on_progress": lambda stage, done, total: loaded.append(stage)}
    assert outcome(LLM, tiny_path, {**options, **progress}) == planned
    assert bool(loaded) == (planned == "fits")


def test_the_sample_of_options_has_both_outcomes(tiny_path: Path) -> None:
    found = [outcome(LLM.plan, tiny_path, options) for options in sampled()]
    assert 5 < found.count("fits") < COMBINATIONS - 5
    assert len(set(found)) > 8


def advised(line: str) -> dict[str, Any]:
    """The options that a line of advice names."""
    return {
        name: ast.literal_eval(value)
        for name, value in re.findall(r"\b([a-z_]+)=('[^']*'|\d+|True|False|None)", line)
    }


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "options",
    [
        {"memory": "1MiB"},
        {"memory": "19MiB"},
        {"memory": "19MiB", "max_num_seqs": 1},
        {"memory": "14MiB", "max_model_len": 64, "max_num_seqs": 1},
        {"memory": "26MiB", "max_model_len": 128},
        {"memory": "26MiB", "kv_policy": "fp16>int8"},
        {"memory": "20MiB", "enable_chunked_prefill": False},
        {"kv_cache_memory_bytes": 3000},
        {"kv_cache_memory_bytes": "1MiB", "memory": "20MiB"},
        {"memory": "900TiB"},
    ],
    ids=str,
)
def test_every_line_of_advice_fits_when_it_is_followed(
    tiny_path: Path, options: dict[str, Any]
) -> None:
    plan = LLM.plan(tiny_path, **options)
    lines = plan.problem.partition("what would help:\n")[2].splitlines()
    followed = 0
    for line in lines:
        said = advised(line.partition(" needs ")[0])
        if not said or line.strip().startswith("a model whose"):
            continue
        followed += 1
        with LLM(tiny_path, **{**options, **said}) as llm:
            [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
            assert len(output.outputs[0].token_ids) == 3, line
    assert not plan.fits and followed
    for other in plan.alternatives:
        with LLM(plan=other.plan) as llm:
            assert llm.memory_plan.total <= other.plan.total


def test_a_budget_beyond_what_is_free_is_told_one_that_loads(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.memory import resolve

    monkeypatch.setattr(resolve, "available_memory", lambda: 40 << 20)
    options: dict[str, Any] = {"memory": "2GiB", "max_model_len": 256}
    problem = LLM.plan(tiny_path, **options).problem
    assert "the machine cannot give what the budget allows" in problem
    with pytest.raises(OutOfMemoryError, match="the machine cannot give"):
        LLM(tiny_path, **options)
    [line] = [line for line in problem.splitlines() if "free now" in line]
    with LLM(tiny_path, **{**options, **advised(line)}) as llm:
        assert llm.max_model_len == 256
