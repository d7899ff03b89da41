"""A GGUF file whose head has the bits of the embedding is like one without a head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk import LLM, SamplingParams
from sdk.loaders.gguf_files.reader import GgufFile
from sdk.loaders.open import open_checkpoint
from tests.loaders.conftest import HIDDEN, VOCAB, GgufBytes, f32, llama_gguf

Save = Callable[..., Path]
OPTIONS: dict[str, Any] = {"compute": "exact", "max_model_len": 32, "skip_tokenizer_init": True}


def with_head(data: bytes, *more: tuple[str, Any]) -> GgufBytes:
    model = llama_gguf()
    model.tensors["output.weight"] = ((HIDDEN, VOCAB), 0, data)
    model.tensors.update(more)
    return model


def logprobs(path: Path) -> tuple[list[float], int]:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, ignore_eos=True)
    with LLM(path, **OPTIONS) as llm:
        assert llm.load_warnings == () or all("output" not in one for one in llm.load_warnings)
        [output] = llm.generate({"prompt_token_ids": [3, 5]}, params)
        rows = output.outputs[0].logprobs or []
        found = [row[token].logprob for row in rows for token in range(VOCAB)]
        return found, llm.memory_plan.weights


def test_an_equal_head_is_in_memory_once(save: Save) -> None:
    without = save(llama_gguf().build(), "without.gguf")
    same = save(with_head(llama_gguf().tensors["token_embd.weight"][2]).build(), "same.gguf")
    other = save(with_head(f32(VOCAB, HIDDEN, seed=99)).build(), "other.gguf")
    expected, weights = logprobs(without)
    assert logprobs(same) == (expected, weights)
    found, more = logprobs(other)
    assert found != expected and more > weights
    assert LLM.plan(same, **OPTIONS).weights == weights


def test_one_different_bit_keeps_both(save: Save) -> None:
    raw = bytearray(llama_gguf().tensors["token_embd.weight"][2])
    raw[-4] ^= 1
    checkpoint = open_checkpoint(save(with_head(bytes(raw)).build()))
    assert not checkpoint.config["tie_word_embeddings"] and checkpoint.has("lm_head")


def test_a_factor_beside_it_keeps_both(save: Save) -> None:
    embedding = llama_gguf().tensors["token_embd.weight"][2]
    scale = ("output.scale", ((1,), 0, np.float32([2.0]).tobytes()))
    checkpoint = open_checkpoint(save(with_head(embedding, scale).build()))
    assert not checkpoint.config["tie_word_embeddings"]


def test_another_type_is_not_compared(
    golden: Path, monkeypatch: pytest.MonkeyPatch, save: Save
) -> None:
    """And where the first rows differ, no others are read."""
    read: list[Any] = []
    data = GgufFile.data
    monkeypatch.setattr(
        GgufFile, "data", lambda self, *a, **k: read.append((a, k)) or data(self, *a, **k)
    )
    monkeypatch.setattr("sdk.loaders.gguf_files.reader._COMPARED", HIDDEN * 4)
    open_checkpoint(save(with_head(f32(VOCAB, HIDDEN, seed=99)).build()))
    assert [k["part"] for _, k in read if "part" in k] == [(0, 1)] * 2
    read.clear()
    model = with_head(bytes(2 * HIDDEN * VOCAB))
    model.tensors["output.weight"] = ((HIDDEN, VOCAB), 1, bytes(2 * HIDDEN * VOCAB))
    open_checkpoint(save(model.build()))
    assert [k for _, k in read if "part" in k] == []
