"""The methods of ``LLM`` that generate no text, for threads and for event loops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
from sdk.requests.job_runner import JobRunner
from sdk.requests.pooling.vectors import OutputDtype, Wanted
from sdk.requests.prompts.reader import PromptLike

if TYPE_CHECKING:
    from sdk.requests.pooling.calls import PoolingRequests


class PoolingMethods:
    """``embed``, ``encode``, ``classify``, ``score`` and ``rerank`` of an :class:`sdk.LLM`.

    Here are their arguments, types and descriptions, as editors, type checkers and ``help`` show
    them; :class:`PoolingRequests` has the work that they and their async twins do.
    """

    _pooling: PoolingRequests
    _job_runner: JobRunner

    @names_keywords
    def embed(
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
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Each prompt's last hidden state after the final norm, scaled to length 1.

        If the files describe embeddings (sentence-transformers' ``modules.json``, a GGUF file's
        ``pooling_type``), it is what they describe: the pooling, dense layers, the length, and the
        default prompt before texts.

        ``prompt_name``: one of the prompts of a sentence-transformers folder (``"query"``), or
        ``prompt``: any text; it is put before every text. ``dimensions``: only the first this many
        numbers, scaled to length 1 again, for models that were trained for it (Matryoshka).
        ``output_dtype``: vectors as integers, see docs/embeddings.md. ``truncate_prompt_tokens``:
        texts with more tokens lose their end; ``-1``: than the model was trained for.
        ``tenant``: see :class:`SamplingParams`.
        """
        wanted = Wanted(prompt_name, prompt, dimensions, output_dtype)
        work = self._pooling.embed(prompts, truncate_prompt_tokens, lora_request, tenant, wanted)
        return self._job_runner.do("embed", work, use_tqdm)

    @names_keywords
    def encode(
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
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """Each prompt's hidden states after the final norm, pooled into ``outputs.data``.

        ``pooling``: the last token's state, the first token's (``"cls"``), the ``"mean"`` or
        ``"max"`` over all tokens, ``"weightedmean"`` (weights 1, 2, 3, ...), ``"mean_sqrt_len"``
        (the sum over the square root of the number), or every token's (``"token"``). Default: what
        the files describe (see :meth:`embed`), else the last token's. ``normalize`` scales each
        vector to length 1. ``prompt_name``, ``prompt``: see :meth:`embed`. A model of late
        interaction (ColBERT) has a vector for each token by default.

        :raises RequestError: an invalid argument, or more results than memory is set aside for.
        """
        wanted = Wanted(prompt_name, prompt)
        work = self._pooling.encode(
            prompts, pooling, normalize, truncate_prompt_tokens, lora_request, tenant, wanted
        )
        return self._job_runner.do("encode", work, use_tqdm)

    @names_keywords
    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        labels: Sequence[str] | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationOutput]:
        """Each prompt's classes, with a checkpoint that has a classification head.

        ``labels``: with a dual encoder (CLIP, SigLIP), whose prompts are images then: texts that
        are classes ("zero-shot"). The probabilities of SigLIP are independent of each other, those
        of CLIP add up to 1. ``use_activation=False`` returns logits instead of probabilities.

        :raises RequestError: the checkpoint has no classification head, or compares no images with
            texts.
        """
        work = self._pooling.classify(
            prompts, use_activation, truncate_prompt_tokens, lora_request, tenant, labels
        )
        return self._job_runner.do("classify", work, use_tqdm)

    @names_keywords
    def score(
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
        """How well texts match, pair by pair; one ``data_1`` may be compared with many ``data_2``.

        With a reranker the probability that ``data_2`` answers ``data_1``. With an embedding model
        the cosine of their embeddings. With any other model the cosine of its last hidden states,
        which says little about relevance; the first such call warns.
        ``chat_template``: see :meth:`rerank`. ``cache_salt``: cached prefixes are shared only with
        requests that have the same one. ``truncate_prompt_tokens``: of a pair with more tokens the
        longer text loses its end; ``-1``: than the context holds.

        :raises RequestError: the lengths do not match.
        """
        return self._job_runner.do(
            "score",
            self._pooling.score(
                data_1,
                data_2,
                chat_template,
                lora_request,
                tenant,
                cache_salt,
                truncate_prompt_tokens,
            ),
        )

    @names_keywords
    def rerank(
        self,
        query: str | Mapping[str, Any],
        documents: Sequence[str | Mapping[str, Any]],
        top_n: int | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRALike | None = None,
        chat_template: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RerankOutput]:
        """The ``top_n`` documents (default: all) that match ``query`` best, best first.

        Where the model reads images, any of them may be ``{"content": [parts]}`` with parts of a
        conversation, such as ``{"type": "image", "image": path}``, also in :meth:`score`.
        Scores are those of :meth:`score`, so a model that is neither a reranker nor an embedding
        model sorts badly, and the first call warns. ``chat_template`` formats a pair for a
        reranker: it gets two messages with the roles ``query`` and ``document``. The default is the
        checkpoint's.

        :raises RequestError: an invalid argument, or a head with other classes.
        """
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
        return self._job_runner.do("rerank", work)


class AsyncPoolingMethods:
    """The same for an event loop: ``aembed``, ``aencode``, ``aclassify``, ``ascore`` and
    ``arerank`` of an :class:`sdk.LLM`, which an :class:`sdk.AsyncLLM` also has without the ``a``.

    Cancelling a call aborts its requests. Long texts are tokenized in a thread.
    """

    _pooling: PoolingRequests
    _job_runner: JobRunner

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
        return await self._job_runner.ado(work, prompts, lora_request)

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
        return await self._job_runner.ado(work, prompts, lora_request)

    @names_keywords
    async def aclassify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        labels: Sequence[str] | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
    ) -> list[ClassificationOutput]:
        """:meth:`LLM.classify` for an event loop."""
        work = self._pooling.classify(
            prompts, use_activation, truncate_prompt_tokens, lora_request, tenant, labels
        )
        return await self._job_runner.ado(work, prompts, lora_request)

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
        return await self._job_runner.ado(work, [data_1, data_2], lora_request)

    @names_keywords
    async def arerank(
        self,
        query: str | Mapping[str, Any],
        documents: Sequence[str | Mapping[str, Any]],
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
        return await self._job_runner.ado(work, [query, documents], lora_request)
