"""Models with recurrent layers through ``LLM``: the answers are the same however requests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from tests.models.conftest import prompt, tiny
from tests.models.test_model_architectures import ARCHITECTURES

NAMES = (
    *("lfm2", "qwen3_5_text", "granitemoehybrid-experts", "falcon_h1", "mamba2", "mamba", "jamba"),
    *("qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "nemotron_h-latent", "olmo_hybrid-rotated"),
)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_alone_together_in_chunks_and_after_hits(
    name: str, tmp_path: Path
) -> None:
    tiny(name.split("-")[0], **ARCHITECTURES[name]).save_pretrained(tmp_path)
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "num_threads": 1,
        "max_model_len": 160,
        "max_num_seqs": 4,
    }
    prompts = [prompt(count, count) for count in (70, 33, 17)]
    with LLM(tmp_path, **options, enable_prefix_caching=False) as llm:
        alone = [answers(llm, [one])[0] for one in prompts]
        assert answers(llm, prompts) == alone
        turns = [[*one, *answer] for one, answer in zip(prompts, alone, strict=True)]
        again = [answers(llm, [one])[0] for one in turns]
    with LLM(tmp_path, **options) as llm:
        assert answers(llm, prompts) == alone
        assert answers(llm, turns) == again
        assert llm.get_metrics()["num_prompt_tokens_cached"] >= sum(map(len, prompts))
    with LLM(tmp_path, **options, max_num_batched_tokens=16) as llm:
        assert answers(llm, prompts) == alone


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_matrices_are_packed_while_a_hybrid_is_loaded(name: str, tmp_path: Path) -> None:
    """But for what makes Mamba-1's time steps: its rank of 6 has no groups of a scheme."""
    tiny(name, **ARCHITECTURES[name]).save_pretrained(tmp_path)
    with LLM(
        tmp_path, skip_tokenizer_init=True, num_threads=1, max_model_len=64, quantization="int8"
    ) as llm:
        assert len(answers(llm, [prompt(20, 1)])[0]) == 20
        assert "w8a16s" in str(llm.explain())


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return [list(found.outputs[0].token_ids) for found in llm.generate(asked, GREEDY)]
