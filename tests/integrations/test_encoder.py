"""SentenceEncoder: the vectors are the model's, by sentence-transformers' names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk import LLM, RequestError
from sdk.integrations.encoder import SentenceEncoder

TEXTS = ["Bees make honey.", "A river flows to the sea.", "Honey is made by bees."]


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Iterator[SentenceEncoder]:
    with LLM(minilm) as llm:
        yield SentenceEncoder(llm)


def test_vectors_are_arrays_of_the_model_s_numbers(encoder: SentenceEncoder) -> None:
    found = encoder.encode(TEXTS, batch_size=2, show_progress_bar=False, device="cpu")
    expected = [one.embedding for one in encoder.llm.embed(TEXTS)]
    assert found.dtype == np.float32 and found.tolist() == np.float32(expected).tolist()
    one = encoder.encode(TEXTS[0], normalize_embeddings=True)
    assert one.shape == (384,) and one.tolist() == found[0].tolist()
    assert encoder.encode([]).shape == (0, 384)


def test_similar_texts_have_larger_cosines(encoder: SentenceEncoder) -> None:
    found = encoder.encode(TEXTS)
    cosines = encoder.similarity(found, found)
    assert cosines.shape == (3, 3) and cosines[0, 2] > cosines[0, 1]
    assert cosines[0, 0] == pytest.approx(1, abs=1e-5)
    assert encoder.similarity(found[0], found).shape == (1, 3)


def test_a_prompt_is_put_before_the_text(encoder: SentenceEncoder) -> None:
    prompted = encoder.encode("bees", prompt="query: ")
    assert np.allclose(prompted, encoder.encode("query: bees"), atol=1e-6)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"precision": "int8"}, "precision: expected 'float32', found 'int8'"),
        ({"output_value": "token_embeddings"}, "output_value: expected 'sentence_embedding'"),
        ({"convert_to_tensor": True}, "convert_to_tensor: expected False, found True"),
        ({"tempo": 1}, "unknown argument tempo"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    encoder: SentenceEncoder, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        encoder.encode("x", **options)
