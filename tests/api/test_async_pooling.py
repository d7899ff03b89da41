"""Embeddings and scores in an event loop are those of the sync calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sdk import RequestError
from sdk.testing import FakeLLM


def test_async_calls_return_what_sync_calls_return(tiny_llm: Any) -> None:
    llm = tiny_llm()
    texts = ["the cat sat", "a dog"]

    async def both() -> list[Any]:
        return await asyncio.gather(
            llm.aembed(texts),
            llm.aencode(texts, pooling="mean", normalize=False),
            llm.ascore(texts[0], texts),
            llm.arerank(texts[0], texts, top_n=1),
        )

    embedded, encoded, scores, ranked = asyncio.run(both())
    assert [one.embedding for one in embedded] == [one.embedding for one in llm.embed(texts)]
    known = llm.encode(texts, pooling="mean", normalize=False)
    for one, other in zip(encoded, known, strict=True):
        assert one.outputs.data.tolist() == other.outputs.data.tolist()
    assert [one.score for one in scores] == [one.score for one in llm.score(texts[0], texts)]
    assert ranked == llm.rerank(texts[0], texts, top_n=1)


def test_errors_are_those_of_the_sync_calls(tiny_llm: Any) -> None:
    with pytest.raises(RequestError, match="classify: this model has no classification head"):
        asyncio.run(tiny_llm().aclassify("the cat"))
    with pytest.raises(RequestError, match="pooling: expected one of"):
        asyncio.run(tiny_llm().aencode("the cat", pooling="sum"))


def test_a_fake_llm_has_them_too() -> None:
    with FakeLLM("yes") as llm:
        [score] = asyncio.run(llm.ascore("a", "a"))
        assert score.score == pytest.approx(1.0)
