"""A plan is within 3 % of what a process really takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peak import measured

from sdk import LLM

_SMALL = {"max_model_len": 256, "max_num_seqs": 8}


@pytest.mark.parametrize(
    "options",
    [
        _SMALL,
        pytest.param({"memory": "256MiB", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
    ],
    ids=["a few requests", "a budget"],
)
@pytest.mark.slow
def test_smollm2_takes_what_was_planned(smollm2: Path, options: dict[str, Any]) -> None:
    found = measured(smollm2, options)
    assert abs(found["planned"] / found["peak"] - 1) <= 0.03, found
    assert found["loaded"] <= 1.03 * found["loading"] + found["tokenizer"], found


@pytest.mark.slow
def test_structured_output_stays_within_the_budget(smollm2: Path) -> None:
    """All pages are full when the vocabulary is read."""
    memory = LLM.plan(smollm2, **_SMALL).total
    found = measured(smollm2, {**_SMALL, "memory": memory, "structured": True})
    assert found["planned"] <= memory
    assert 0.95 * memory <= found["peak"] <= 1.01 * memory, found


@pytest.mark.slow
def test_gemma_with_its_large_vocabulary_takes_what_was_planned(gemma3: Path) -> None:
    found = measured(gemma3, _SMALL)
    assert abs(found["planned"] / found["peak"] - 1) <= 0.03, found
    assert found["loaded"] <= 1.03 * found["loading"] + found["tokenizer"], found
