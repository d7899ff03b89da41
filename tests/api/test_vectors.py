"""Vectors as a caller asks for them: fewer numbers, other types."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk import LLM, AsyncLLM, RequestError
from sdk.requests.pooling.vectors import packed

TEXTS = ["Bees make honey.", "The shop opens at nine.", "x"]


@pytest.fixture(scope="module")
def llm(golden: Path) -> Iterator[LLM]:
    with LLM(golden / "arch-qwen3" / "hf", max_model_len=128, num_threads=1) as llm:
        yield llm


def test_fewer_dimensions_are_the_first_numbers_at_length_one(llm: LLM) -> None:
    whole = np.array([one.embedding for one in llm.embed(TEXTS)])
    short = np.array([one.embedding for one in llm.embed(TEXTS, dimensions=10)])
    expected = whole[:, :10] / np.linalg.norm(whole[:, :10], axis=1, keepdims=True)
    assert np.allclose(short, expected, atol=1e-6)
    size = whole.shape[1]
    assert [one.embedding for one in llm.embed(TEXTS, dimensions=size)] == whole.tolist()
    with pytest.raises(RequestError, match=rf"dimensions: expected at most {size}.*{size + 1}"):
        llm.embed(TEXTS, dimensions=size + 1)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "binary", "ubinary"])
def test_integers_are_those_of_the_vector(llm: LLM, dtype: Any) -> None:
    exact = [one.embedding for one in llm.embed(TEXTS)]
    found = [one.embedding for one in llm.embed(TEXTS, output_dtype=dtype)]
    assert found == [packed(vector, dtype) for vector in exact]
    short = llm.embed(TEXTS[0], output_dtype=dtype, dimensions=16)[0].embedding
    assert len(short) == (16 if "int8" in dtype else 2)

    async def later() -> Any:
        async with AsyncLLM(llm) as other:
            return await other.embed(TEXTS, output_dtype=dtype)

    assert [one.embedding for one in asyncio.run(later())] == found


def test_eight_bits_keep_the_cosine_and_one_bit_the_signs() -> None:
    x, y = np.random.default_rng(3).normal(0.4, size=(2, 384))
    cosine = x @ y / np.linalg.norm(x) / np.linalg.norm(y)
    for dtype, offset in (("int8", 0), ("uint8", 128)):
        a, b = (np.array(packed(v, dtype)) - offset for v in (x, y))
        assert max(np.abs(a).max(), np.abs(b).max()) == 127
        assert abs(a @ b / np.linalg.norm(a) / np.linalg.norm(b) - cosine) < 1e-3
    bits = np.array(packed(x, "ubinary"), np.uint8)
    assert np.array_equal(np.unpackbits(bits), x > 0)
    signed = np.array(packed(x, "binary"))
    assert np.array_equal(signed, bits.astype(int) - 128) and signed.min() >= -128
    assert packed([0.0] * 8, "int8") == [0] * 8 and packed([1.0] * 9, "ubinary") == [255, 128]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 0}, "dimensions: expected a positive integer, found 0"),
        ({"dimensions": True}, "dimensions: expected a positive integer, found True"),
        ({"output_dtype": "int4"}, "output_dtype: expected one of float32, int8.*found 'int4'"),
        ({"prompt": 3}, "prompt: expected a string, found 3"),
        ({"prompt_name": 3}, "prompt_name: expected a string, found 3"),
        ({"prompt": "a", "prompt_name": "b"}, "expected one of the two, found both"),
    ],
)
def test_bad_options_are_refused(llm: LLM, options: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.embed("a", **options)


def test_a_text_that_is_cut_keeps_its_beginning(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(TEXTS[0])
    for call in (llm.embed, llm.encode):
        [found] = call(TEXTS[0], truncate_prompt_tokens=3)
        assert found.prompt_token_ids == ids[:3]
        [found] = call({"prompt_token_ids": ids}, truncate_prompt_tokens=3)
        assert found.prompt_token_ids == ids[:3]
    with pytest.raises(RequestError, match="truncate_prompt_tokens=-1 to keep its beginning"):
        llm.embed("many words " * 200)
