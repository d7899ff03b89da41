"""Embeddings for the classes of frameworks: what they all ask of an :class:`sdk.LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sdk import LLM
from sdk.quant.safe_repr import safe_repr


def check_llm(llm: Any) -> None:
    """:raises TypeError: ``llm`` is something else, such as the path of a model."""
    if not isinstance(llm, LLM):
        raise TypeError(f"llm: expected an open sdk.LLM, found {safe_repr(llm)}; use LLM(PATH)")


@dataclass(frozen=True)
class Vectors:
    """Texts as vectors of length 1. Texts longer than the context lose their end.

    ``query``, ``document``: names of prompts of a sentence-transformers folder. ``dimensions``: see
    :meth:`sdk.LLM.embed`.
    """

    llm: LLM
    query: str | None = None
    document: str | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        check_llm(self.llm)

    def of_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return self._embed(texts, self.document)

    def of_query(self, text: str) -> list[float]:
        return self._embed([text], self.query)[0]

    async def aof_documents(self, texts: Sequence[str]) -> list[list[float]]:
        return await self._aembed(texts, self.document)

    async def aof_query(self, text: str) -> list[float]:
        return (await self._aembed([text], self.query))[0]

    def _options(self, prompt: str | None) -> dict[str, Any]:
        return {
            "prompt_name": prompt,
            "dimensions": self.dimensions,
            "truncate_prompt_tokens": -1,
        }

    def _embed(self, texts: Sequence[str], prompt: str | None) -> list[list[float]]:
        if not texts:
            return []
        found = self.llm.embed(list(texts), use_tqdm=False, **self._options(prompt))
        return [one.embedding for one in found]

    async def _aembed(self, texts: Sequence[str], prompt: str | None) -> list[list[float]]:
        if not texts:
            return []
        found = await self.llm.aembed(list(texts), **self._options(prompt))
        return [one.embedding for one in found]
