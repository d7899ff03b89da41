"""Encoders in 8 bits: the vectors of float32, whatever their files call and join.

Two random layers, because they amplify rounding: of four GTE's in torch, rounded to 8 bits in
groups of 32, the smallest cosine was 0.995.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk import LLM
from tests.models import reference_encoders as reference
from tests.models.conftest import prompt, tiny_encoder


def of_transformers(kind: str, **options: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        tiny_encoder(kind, num_hidden_layers=2, **options).save_pretrained(folder)
        return folder

    return save


def jina(code: bool) -> Callable[[Path], Path]:
    config = reference.jina_config(code=code, intermediate_size=128, num_hidden_layers=2)
    return lambda folder: reference.save(folder, config, reference.jina_state(config))


def nomic(folder: Path) -> Path:
    config = reference.nomic_config(n_inner=128, n_layer=2)
    return reference.save(folder, config, reference.nomic_state(config))


MODELS: dict[str, Callable[[Path], Path]] = {
    "mpnet": of_transformers("mpnet", pad_token_id=1),
    "gte": of_transformers("gte", type_vocab_size=1),
    "electra": of_transformers("electra", embedding_size=32),
    "jina v3": of_transformers("jina_embeddings_v3"),
    "jina v2": jina(code=False),
    "jina v2 code": jina(code=True),
    "nomic v2": nomic,
}
IDS = [{"prompt_token_ids": prompt(length, length)} for length in (1, 9, 40, 77)]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", MODELS)
def test_vectors_in_8_bits_point_where_those_of_float32_do(name: str, tmp_path: Path) -> None:
    folder = MODELS[name](tmp_path / "m")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "compute": "exact"}
    with LLM(folder, **options) as llm:
        wanted = [one.outputs.data.numpy() for one in llm.encode(IDS, pooling="mean")]
    with LLM(folder, quantization="rtn-w8g32", **options) as llm:
        assert "w8" in str(llm.quant_report())
        found = [one.outputs.data.numpy() for one in llm.encode(IDS, pooling="mean")]
    for one, other in zip(found, wanted, strict=True):
        assert float(one @ other) >= 0.999 and not np.array_equal(one, other)
