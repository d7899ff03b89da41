"""Weights that draft on a card: their inputs, hidden states and steps are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_card import on_a_card

from sdk import LLM, SamplingParams
from tests.drafting_heads import PROMPTS, TinyHeads

LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 6}
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("adaptive", [False, True], ids=["always", "adaptive"])
@pytest.mark.parametrize("method", ["self", "draft_model", "eagle", "eagle3", "medusa"])
def test_the_answers_are_those_without_drafts(
    method: str, adaptive: bool, golden: Path, request: pytest.FixtureRequest
) -> None:
    """Adaptive drafts leave steps without any, which could be launched ahead."""
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": adaptive}
    path = golden / "arch-llama3" / "hf"
    if method == "draft_model":
        path = golden / "gguf-Q8_0" / "model.gguf"
        config["model"] = golden / "gguf-Q4_0" / "model.gguf"
    elif method != "self":
        heads: TinyHeads = request.getfixturevalue("tiny_heads")
        path, config["model"] = heads.target, heads.folders[method]
    with LLM(path, **LIMITS) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, DRAWN)]
    with on_a_card(path, speculative_config=config | {"prompt_lookup_min": 0}, **LIMITS) as (
        llm,
        _,
    ):
        found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, DRAWN)]
        assert llm.get_metrics()["num_draft_tokens"] > 0
    assert found == wanted
