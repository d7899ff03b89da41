"""A plan is within 3 % of what a process really takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from folders import KINDS, Shape, write_folder
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_opening_a_folder_takes_what_was_planned(kind: str, tmp_path: Path) -> None:
    """In shards that end between the tensors of a layer; embedding and head are most of the
    bytes."""
    shape = Shape(layers=4, hidden=2048, mlp=5632, heads=16, kv_heads=4, vocab=64000)
    folder = write_folder(tmp_path / kind, kind, shape, shard=3e8)
    found = measured(folder, {**_SMALL, "opening": True, "skip_tokenizer_init": True})
    assert found["weights"] <= found["planned"]
    assert 0.5 * found["planned"] <= found["peak"] <= 1.03 * found["planned"], found
