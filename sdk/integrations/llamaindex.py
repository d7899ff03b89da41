"""LlamaIndex's embeddings, reranker and chat model on an :class:`sdk.LLM` in this process.

``pip install llama-index-core``; for :func:`chat_model` also ``llama-index-llms-openai-like`` and
the extra ``server``. ``docs/guides/frameworks.md`` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdk import LLM
from sdk.integrations.vectors import Vectors, check_llm
from sdk.kernels.packages import needed_for

with needed_for("sdk.integrations.llamaindex needs"):
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle


def chat_model(llm: LLM, model: str = "embedlm", **options: Any) -> Any:
    """LlamaIndex's ``OpenAILike`` on openai's clients, whose requests ``llm`` answers.

    ``options``: those of ``OpenAILike``, such as ``temperature`` and ``max_tokens``. Streams,
    tools, typed answers and async calls work; the owner of ``llm`` closes it.
    """
    with needed_for("sdk.integrations.llamaindex.chat_model needs"):
        from llama_index.llms.openai_like import OpenAILike
    check_llm(llm)

    from sdk.integrations.openai import async_client, client

    given = {
        "is_chat_model": True,
        "is_function_calling_model": True,
        "should_use_structured_outputs": True,
        "context_window": llm.max_model_len,
        "max_retries": 0,
        **options,
    }
    models = {model: llm}
    return OpenAILike(
        model=model,
        openai_client=client(models),
        async_openai_client=async_client(models),
        **given,
    )


class EmbedLMEmbedding(BaseEmbedding):
    """Embeddings of an ``llm`` with an embedding model.

    ``query_prompt``, ``document_prompt``: names of prompts of a sentence-transformers folder
    (``"query"``). ``dimensions``: see :meth:`sdk.LLM.embed`. Texts longer than the context lose
    their end.
    """

    llm: Any = Field(exclude=True, repr=False)
    query_prompt: str | None = None
    document_prompt: str | None = None
    dimensions: int | None = None
    _vectors: Vectors = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        check_llm(self.llm)
        if "model_name" not in self.model_fields_set:
            self.model_name = Path(self.llm.config.model).name
        self._vectors = Vectors(self.llm, self.query_prompt, self.document_prompt, self.dimensions)

    @classmethod
    def class_name(cls) -> str:
        return "EmbedLMEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._vectors.of_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await self._vectors.aof_query(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._vectors.of_documents([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._vectors.of_documents(texts)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._vectors.aof_documents([text]))[0]

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self._vectors.aof_documents(texts)


class EmbedLMRerank(BaseNodePostprocessor):
    """Keeps the ``top_n`` nodes that match the query best, best first, with the model's scores.

    See :meth:`sdk.LLM.rerank` about models.
    """

    llm: Any = Field(exclude=True, repr=False)
    top_n: int | None = 2

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        check_llm(self.llm)

    @classmethod
    def class_name(cls) -> str:
        return "EmbedLMRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query, texts = _texts(nodes, query_bundle)
        return _ranked(nodes, self.llm.rerank(query, texts, self.top_n)) if texts else []

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query, texts = _texts(nodes, query_bundle)
        return _ranked(nodes, await self.llm.arerank(query, texts, self.top_n)) if texts else []


def _texts(nodes: Sequence[NodeWithScore], query: QueryBundle | None) -> tuple[str, list[str]]:
    if query is None:
        raise ValueError("EmbedLMRerank: expected a query (query_str or query_bundle), found none")
    return query.query_str, [one.node.get_content(MetadataMode.EMBED) for one in nodes]


def _ranked(nodes: Sequence[NodeWithScore], ranks: Sequence[Any]) -> list[NodeWithScore]:
    return [NodeWithScore(node=nodes[one.index].node, score=one.relevance_score) for one in ranks]
