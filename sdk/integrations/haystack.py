"""Haystack's components on an :class:`sdk.LLM` in this process.

``pip install haystack-ai``; for :func:`chat_generator` also the extra ``server``. The components
hold an open model, so a pipeline with them is not saved to a file: build it in code.
``docs/guides/frameworks.md`` shows it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sdk import LLM
from sdk.integrations.vectors import Vectors, check_llm
from sdk.kernels.packages import needed_for

with needed_for("sdk.integrations.haystack needs"):
    from haystack import Document, component
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.core.errors import SerializationError
    from haystack.utils import Secret


def chat_generator(llm: LLM, model: str = "embedlm", **options: Any) -> OpenAIChatGenerator:
    """Haystack's ``OpenAIChatGenerator`` on openai's clients, whose requests ``llm`` answers.

    ``options``: those of ``OpenAIChatGenerator``, such as ``generation_kwargs``,
    ``streaming_callback`` and ``tools``. The owner of ``llm`` closes it.
    """
    from sdk.integrations.openai import async_client, client

    check_llm(llm)
    made = OpenAIChatGenerator(api_key=Secret.from_token("none"), model=model, **options)
    made.client, made.async_client = client({model: llm}), async_client({model: llm})
    return made


class _Open:
    """What components with an open model have in common."""

    def to_dict(self) -> dict[str, Any]:
        """:raises SerializationError: an open model is not saved."""
        raise SerializationError(
            f"{type(self).__name__}: holds an open model, so its pipeline is not saved to a file; "
            "build it in code"
        )


@component
class EmbedLMTextEmbedder(_Open):
    """The vector of a query. ``query_prompt``: the name of a prompt of a sentence-transformers
    folder (``"query"``). ``dimensions``: see :meth:`sdk.LLM.embed`."""

    def __init__(
        self, llm: LLM, *, query_prompt: str | None = None, dimensions: int | None = None
    ) -> None:
        self._vectors = Vectors(llm, query=query_prompt, dimensions=dimensions)

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        """``embedding``: the vector."""
        return {"embedding": self._vectors.of_query(text)}

    @component.output_types(embedding=list[float])
    async def run_async(self, text: str) -> dict[str, Any]:
        """:meth:`run` for an event loop."""
        return {"embedding": await self._vectors.aof_query(text)}


@component
class EmbedLMDocumentEmbedder(_Open):
    """Documents with vectors of their contents, and of the metadata that
    ``meta_fields_to_embed`` names, one a line before the content."""

    def __init__(
        self,
        llm: LLM,
        *,
        document_prompt: str | None = None,
        dimensions: int | None = None,
        meta_fields_to_embed: list[str] | None = None,
    ) -> None:
        self._vectors = Vectors(llm, document=document_prompt, dimensions=dimensions)
        self._fields = meta_fields_to_embed or []

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """``documents``: copies with their ``embedding``."""
        return _embedded(documents, self._vectors.of_documents(self._texts(documents)))

    @component.output_types(documents=list[Document])
    async def run_async(self, documents: list[Document]) -> dict[str, Any]:
        """:meth:`run` for an event loop."""
        return _embedded(documents, await self._vectors.aof_documents(self._texts(documents)))

    def _texts(self, documents: list[Document]) -> list[str]:
        found = []
        for one in documents:
            facts = [str(one.meta[name]) for name in self._fields if one.meta.get(name) is not None]
            found.append("\n".join([*facts, one.content or ""]))
        return found


@component
class EmbedLMRanker(_Open):
    """Keeps the ``top_k`` documents that match a query best, best first, with their ``score``.

    See :meth:`sdk.LLM.rerank` about models.
    """

    def __init__(self, llm: LLM, *, top_k: int | None = 10) -> None:
        check_llm(llm)
        self._llm, self._top_k = llm, _at_least_one(top_k)

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, Any]:
        """``documents``: the best."""
        texts = [one.content or "" for one in documents]
        most = self._top_k if top_k is None else _at_least_one(top_k)
        ranks = self._llm.rerank(query, texts, most) if texts else []
        return _ranked(documents, ranks)

    @component.output_types(documents=list[Document])
    async def run_async(
        self, query: str, documents: list[Document], top_k: int | None = None
    ) -> dict[str, Any]:
        """:meth:`run` for an event loop."""
        texts = [one.content or "" for one in documents]
        most = self._top_k if top_k is None else _at_least_one(top_k)
        ranks = await self._llm.arerank(query, texts, most) if texts else []
        return _ranked(documents, ranks)


def _at_least_one(top_k: int | None) -> int | None:
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k: expected an integer of at least 1, found {top_k}")
    return top_k


def _embedded(documents: list[Document], vectors: list[list[float]]) -> dict[str, Any]:
    pairs = zip(documents, vectors, strict=True)
    return {"documents": [replace(one, embedding=vector) for one, vector in pairs]}


def _ranked(documents: list[Document], ranks: Any) -> dict[str, Any]:
    return {
        "documents": [replace(documents[one.index], score=one.relevance_score) for one in ranks]
    }
