"""Recorded steps and steps that run operator by operator have the same bits, for all architectures:
alone, in a batch, in chunks and after prefix hits, with one thread and two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sdk import LLM, SamplingParams
from sdk.models.architecture import architecture
from sdk.models.configs.keys import FIXED, read_keys
from tests.models.conftest import prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=20)
PROMPTS = [prompt(45, 1), prompt(18, 2), prompt(5, 3), prompt(45, 1)[:35] + prompt(4, 4)]
WAYS: list[dict[str, Any]] = [
    {"num_threads": 1, "max_num_batched_tokens": 128},
    {"num_threads": 2, "max_num_batched_tokens": 24, "enforce_eager": True},
]
Answer = tuple[tuple[int, ...], list[dict[int, float]]]


def written(name: str, seed: int, folder: Path) -> None:
    tiny(name.split("-")[0], seed, **ARCHITECTURES[name]).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    own = architecture(config["model_type"])
    read = frozenset() if own is None else read_keys(own)
    path.write_text(json.dumps({k: v for k, v in config.items() if k not in FIXED or k in read}))


def tie_experts(folder: Path) -> int:
    """Give every second expert the router's row of the one before it; returns the routers."""
    path, count = folder / "model.safetensors", 0
    tensors = load_file(path)
    for name, rows in tensors.items():
        if rows.dim() == 2 and len(rows) < 10 and (".gate." in name or "router" in name):
            rows[1::2] = rows[: len(rows) // 2 * 2 : 2]
            count += 1
        elif "correction_bias" in name:
            rows.copy_(rows.round())
    save_file(tensors, path, metadata={"format": "pt"})
    return count


def answers(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Answer]:
    given = [{"prompt_token_ids": list(one)} for one in prompts]
    found = []
    for output in llm.generate(given, params, use_tqdm=False):
        [one] = output.outputs
        rows = [{t: x.logprob for t, x in row.items()} for row in one.logprobs or ()]
        found.append((tuple(one.token_ids), rows))
    return found


def assert_same_bits(folder: Path, compute: str) -> None:
    expected: dict[bool, list[Answer]] = {}
    for way in WAYS:
        with LLM(
            folder,
            skip_tokenizer_init=True,
            max_model_len=96,
            max_num_seqs=4,
            compute=compute,
            **way,
        ) as llm:
            for params in (GREEDY, SCORED):
                scored = params is SCORED
                alone = [answers(llm, [one], params)[0] for one in PROMPTS]
                assert expected.setdefault(scored, alone) == alone, way
                assert answers(llm, PROMPTS, params) == alone, (way, "after hits")
                llm.reset_prefix_cache()
                assert answers(llm, PROMPTS, params) == alone, (way, "in a batch")


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_steps_have_the_bits_of_single_operators(name: str, tmp_path: Path) -> None:
    written(name, 3, tmp_path)
    assert_same_bits(tmp_path, "auto")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("compute", ["auto", "exact"])
@pytest.mark.parametrize(
    "name", ["glm4_moe", "deepseek_v3", "minimax_m2", "ernie4_5_moe", "nemotron_h-latent"]
)
def test_equal_scores_choose_the_same_experts(name: str, compute: str, tmp_path: Path) -> None:
    written(name, 4, tmp_path)
    assert tie_experts(tmp_path)
    assert_same_bits(tmp_path, compute)
