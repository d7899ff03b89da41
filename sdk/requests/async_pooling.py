"""Calls that generate no tokens, for an event loop."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.api.lora import LoRALike, LoRAsLike
from sdk.api.near_misses import names_keywords
from sdk.api.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingRequestOutput,
    RerankOutput,
    ScoringOutput,
)
from sdk.engine.plan import PoolingMode
from sdk.requests.calls import Calls
from sdk.requests.pooling import PoolingCalls
from sdk.requests.prompts import PromptLike
from sdk.requests.vectors import OutputDtype, Wanted


class AsyncPooling:
    """``aembed``, ``aencode``, ``aclassify``, ``ascore`` and ``arerank`` of an ``LLM``.

    Cancelling a call aborts its requests. Long texts are tokenized in a thread.
    """

    _pooling: PoolingCalls
    _calls: Calls

    @names_keywords
    async def aembed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        output_dtype: OutputDtype = "float32",
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
    ) -> list[EmbeddingOutput]:
        """:meth:`LLM.embed` for an event loop."""
        wanted = Wanted(prompt_name, prompt, dimensions, output_dtype)
        work = self._pooling.embed(prompts, truncate_prompt_tokens, lora_request, tenant, wanted)
        return await self._calls.ado(work, prompts, lora_request)

    @names_keywords
    async def aencode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling: PoolingMode | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """:meth:`LLM.encode` for an event loop."""
        wanted = Wanted(prompt_name, prompt)
        work = self._pooling.encode(
            prompts, pooling, normalize, truncate_prompt_tokens, lora_request, tenant, wanted
        )
        return await self._calls.ado(work, prompts, lora_request)

    @names_keywords
    async def aclassify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
    ) -> list[ClassificationOutput]:
        """:meth:`LLM.classify` for an event loop."""
        work = self._pooling.classify(
            prompts, use_activation, truncate_prompt_tokens, lora_request, tenant
        )
        return await self._calls.ado(work, prompts, lora_request)

    @names_keywords
    async def ascore(
        self,
        data_1: PromptLike | Sequence[PromptLike],
        data_2: PromptLike | Sequence[PromptLike],
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRALike | None = None,
        chat_template: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[ScoringOutput]:
        """:meth:`LLM.score` for an event loop."""
        work = self._pooling.score(
            data_1, data_2, chat_template, lora_request, tenant, cache_salt, truncate_prompt_tokens
        )
        return await self._calls.ado(work, [data_1, data_2], lora_request)

    @names_keywords
    async def arerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRALike | None = None,
        chat_template: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RerankOutput]:
        """:meth:`LLM.rerank` for an event loop."""
        work = self._pooling.rerank(
            query,
            documents,
            top_n,
            chat_template,
            lora_request,
            tenant,
            cache_salt,
            truncate_prompt_tokens,
        )
        return await self._calls.ado(work, [query, documents], lora_request)
