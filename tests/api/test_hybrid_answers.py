"""Models with recurrent layers through ``LLM``: the answers are the same however requests run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk import LLM
from tests.models.conftest import prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES
from tests.same_answers import answers, check_answers

NAMES = (
    *("lfm2", "qwen3_5_text", "granitemoehybrid-experts", "falcon_h1", "mamba2", "mamba", "jamba"),
    *("qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "nemotron_h-latent", "olmo_hybrid-rotated"),
)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_same_alone_together_in_chunks_and_after_hits(
    name: str, tmp_path: Path
) -> None:
    tiny(name.split("-")[0], **ARCHITECTURES[name]).save_pretrained(tmp_path)
    check_answers(tmp_path)


@pytest.mark.parametrize("name", ["lfm2", "mamba"])
def test_matrices_are_packed_while_a_hybrid_is_loaded(name: str, tmp_path: Path) -> None:
    """But for what makes Mamba-1's time steps: its rank of 6 has no groups of a scheme."""
    tiny(name, **ARCHITECTURES[name]).save_pretrained(tmp_path)
    with LLM(
        tmp_path, skip_tokenizer_init=True, num_threads=1, max_model_len=64, quantization="int8"
    ) as llm:
        assert len(answers(llm, [prompt(20, 1)])[0]) == 20
        assert "w8a16s" in str(llm.explain())
