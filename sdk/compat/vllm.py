"""``LLM`` and ``AsyncLLMEngine``: vLLM's offline interface on an :class:`sdk.LLM`, in this process.

A program that was written for vLLM changes only its import line. ``LLM.llm`` is the LLM with
everything that vLLM has no name for. docs/compat.md lists the differences.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from sdk import LLM as _OurLLM, AsyncLLM as _OurAsyncLLM
from sdk.compat._vllm_options import (
    LLM_SIGNATURE,
    AsyncEngineArgs as AsyncEngineArgs,
    EngineArgs as EngineArgs,
    llm_options,
    structure_options,
)
from sdk.compat._vllm_outputs import (
    BeamSearchOutput as BeamSearchOutput,
    BeamSearchSequence as BeamSearchSequence,
    ClassificationOutput as ClassificationOutput,
    ClassificationRequestOutput as ClassificationRequestOutput,
    CompletionOutput as CompletionOutput,
    EmbeddingOutput as EmbeddingOutput,
    EmbeddingRequestOutput as EmbeddingRequestOutput,
    PoolingOutput as PoolingOutput,
    PoolingRequestOutput as PoolingRequestOutput,
    RequestOutput as RequestOutput,
    RequestStateStats as RequestStateStats,
    ScoringOutput as ScoringOutput,
    ScoringRequestOutput as ScoringRequestOutput,
    beam_output,
    class_output,
    embedding_output,
    pooling_output,
    request_output,
    score_output,
)
from sdk.compat._vllm_params import (
    BeamSearchParams as BeamSearchParams,
    LoRARequest as LoRARequest,
    PoolerConfig as PoolerConfig,
    PoolingParams as PoolingParams,
    SamplingParams as SamplingParams,
    TextPrompt as TextPrompt,
    TokensPrompt as TokensPrompt,
    check_absent,
    our_params,
    our_prompt,
    pooler_of,
)
from sdk.errors import RequestError, SdkError
from sdk.loading.sampling_defaults import OWN, OWN_SOURCE
from sdk.logprobs import Logprob as Logprob
from sdk.params import RequestOutputKind as RequestOutputKind
from sdk.quant.safe_repr import safe_repr
from sdk.requests.adapters import as_ours
from sdk.requests.prompts import as_list
from sdk.structured.params import StructuredOutputsParams as StructuredOutputsParams
from sdk.tokenizer import LLMTokenizer

PromptType = Any
GuidedDecodingParams = StructuredOutputsParams
#: Sampling parameters of a model's files that vLLM uses too.
_FROM_FILES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TASKS = ("embed", "token_embed", "classify")


class LLM:
    """A model with the methods and results of vLLM's ``LLM``.

    ``kwargs`` are the other fields of :class:`EngineArgs`, or options of ``sdk.LLM`` that vLLM does
    not have (``memory="2GiB"``).

    :raises RequestError: an option cannot be honored; the message names it.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._structure = structure_options(options)
        self._pooler = pooler_of(options.get("pooler_config"))
        self.llm = _OurLLM(model, **llm_options(options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An LLM with these options."""
        return cls(**vars(engine_args))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and give back memory and threads."""
        self.llm.close()

    # ---- text ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs come in their order."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        items = [our_prompt(one) for one in as_list(prompts)]
        params = self._params(sampling_params)
        found = self.llm.generate(
            [prompt for prompt, _ in items],
            params,
            lora_request=lora_request,
            priority=priority,
            use_tqdm=bool(use_tqdm),
        )
        pairs = zip(found, items, strict=True)
        return [request_output(output, self._text_of, text) for output, (_, text) in pairs]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or more conversations."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        template = _template(
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        params = self._params(sampling_params)
        found = self.llm.chat(
            messages,
            params,
            lora_request=lora_request,
            priority=priority,
            use_tqdm=bool(use_tqdm),
            **template,
        )
        return [request_output(output, self._text_of) for output in found]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search each prompt's most probable answers."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params: expected BeamSearchParams, found {safe_repr(params)}")
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        step = max(1, len(items)) if concurrency_limit is None else concurrency_limit
        if not isinstance(step, int) or step < 1:
            raise RequestError(f"concurrency_limit: expected at least 1, found {safe_repr(step)}")
        adapters = self.llm._jobs.adapters.of(lora_request, len(items))
        found = [
            output
            for first in range(0, len(items), step)
            for output in self.llm._calls.do(
                self.llm._beam_searches.search(
                    items[first : first + step],
                    params.ours(),
                    use_tqdm,
                    [one and one.lora_request for one in adapters[first : first + step]],
                )
            )
        ]

        def decode(ids: list[int]) -> str:
            return self.get_tokenizer().decode(ids, params.skip_special_tokens)

        parts = zip(items, found, adapters, strict=True)
        return [
            beam_output(
                item, one, decode, self._text_of, None if lora is None else lora.lora_request
            )
            for item, one, lora in parts
        ]

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, changed by the model's files."""
        found = self.llm.get_default_sampling_params()
        own = OWN if self.llm._defaults.source.endswith(OWN_SOURCE) else {}
        values = {name: getattr(found, name) for name in _FROM_FILES}
        given = {name: value for name, value in values.items() if own.get(name) != value}
        return SamplingParams.from_optional(**given, max_tokens=found.max_tokens)

    def _text_of(self, token: int) -> str:
        data = self.get_tokenizer().decode_bytes([token])
        return data.decode("utf-8", errors="ignore")

    def _params(self, given: Any) -> Any:
        """Parameters for ``self.llm``."""
        chosen = self.get_default_sampling_params() if given is None else given
        return our_params(chosen, self._structure)

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Any = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts; :meth:`wait_for_completion` runs them."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        params = self._params(sampling_params)
        return self.llm.enqueue(items, params, lora_request=lora_request, priority=priority)

    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations; :meth:`wait_for_completion` runs them."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        template = _template(
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        params = self._params(sampling_params)
        return self.llm.enqueue(
            messages, params, lora_request=lora_request, priority=priority, **template
        )

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: Any = True
    ) -> list[RequestOutput]:
        """Run all queued requests; their outputs, in the order of queueing."""
        found = self.llm.wait_for_completion()
        return [request_output(output, self._text_of) for output in found]

    # ---- embeddings ------------------------------------------------------------------------------

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pooled hidden states. ``pooling_task``: "embed", "token_embed" or "classify"."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        params = _pooling(pooling_params)
        task = pooling_task or params.task
        if task not in _TASKS:
            raise RequestError(
                f"pooling_task: expected one of {', '.join(_TASKS)}, found {safe_repr(task)}"
            )
        if task == "classify":
            classes = self.classify(prompts, pooling_params=params, lora_request=lora_request)
            return [_as_tensor(one) for one in classes]
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        found = self.llm.encode(
            items,
            pooling="token" if task == "token_embed" else self._pooler.mode,
            normalize=self._pooler.activates(params),
            lora_request=lora_request,
            use_tqdm=bool(use_tqdm),
        )
        return [pooling_output(output) for output in found]

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt's last hidden state; scaled to length 1 unless ``use_activation=False``."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        activates = self._pooler.activates(_pooling(pooling_params))
        found = self.llm.encode(
            items,
            pooling=self._pooler.mode,
            normalize=activates,
            lora_request=lora_request,
            use_tqdm=bool(use_tqdm),
        )
        return [embedding_output(output) for output in found]

    def classify(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Each prompt's classes, with a checkpoint that has a classification head."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        activates = self._pooler.activates(_pooling(pooling_params))
        found = self.llm.classify(
            items, use_activation=activates, lora_request=lora_request, use_tqdm=bool(use_tqdm)
        )
        return [class_output(output) for output in found]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts match, pair by pair."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        activates = self._pooler.activates(_pooling(pooling_params))
        if not activates or self._pooler.mode not in (None, "last"):
            raise RequestError(
                "score: use_activation=False and other poolings than LAST are not supported; use "
                "embed"
            )
        found = self.llm.score(
            data_1, data_2, lora_request=lora_request, chat_template=chat_template
        )
        return [score_output(output) for output in found]

    # ---- the engine ------------------------------------------------------------------------------

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer with transformers' methods."""
        return self.llm.get_tokenizer()

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of ranks."""
        return self.llm.config.tensor_parallel_size

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes."""
        return self.llm.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights too. Nothing may run."""
        self.llm.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take the memory again. ``tags`` has no effect: everything wakes up."""
        self.llm.wake_up()
        return True


LLM.__signature__ = LLM_SIGNATURE  # type: ignore[attr-defined]


class AsyncLLMEngine:
    """vLLM's engine for an event loop: ``AsyncLLMEngine.from_engine_args(AsyncEngineArgs(...))``.

    ``AsyncLLMEngine(llm)`` shares an :class:`LLM`, which its owner closes.
    """

    def __init__(self, llm: LLM) -> None:
        self._offline = llm
        self.llm = llm.llm
        self._engine = _OurAsyncLLM(self.llm)
        self._owned = False
        self._sleeping = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Any = None,
    ) -> AsyncLLMEngine:
        """An engine with these options. This blocks while the model loads."""
        options = dict(vars(engine_args))
        options.pop("enable_log_requests", None)
        engine = cls(LLM(**options))
        engine._owned = True
        return engine

    def shutdown(self, timeout: float | None = None) -> None:
        """End all requests and give back memory and threads."""
        if self._owned:
            self.llm.close()

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the answer to one prompt. Closing the generator aborts the request."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        item, text = our_prompt(prompt)
        params = self._offline._params(sampling_params)
        pieces = self._engine.generate(
            item, params, request_id, lora_request=lora_request, priority=priority
        )
        try:
            async for piece in pieces:
                yield request_output(piece, self._offline._text_of, prompt_text or text)
        finally:
            await pieces.aclose()

    async def encode(
        self,
        prompt: Any,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: Any = None,
        trace_headers: Any = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        reasoning_ended: bool | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """The pooled hidden states of one prompt, for ``pooling_params.task``."""
        [found] = await asyncio.to_thread(
            self._offline.encode,
            prompt,
            pooling_params,
            use_tqdm=False,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        found.request_id = request_id
        yield found

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests; their generators yield a last output with ``finish_reason="abort"``."""
        self.llm.abort(request_id if isinstance(request_id, str) else list(request_id))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        await self._engine.add_lora(as_ours(lora_request))
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. ``False``: there is none of this number."""
        return await self._engine.remove_lora(lora_id)

    async def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory."""
        return await self._engine.pin_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """The numbers of all adapters."""
        return {known.int_id for known in await self._engine.list_loras()}

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer with transformers' methods."""
        return self.llm.get_tokenizer()

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes."""
        return self.llm.reset_prefix_cache()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See :meth:`LLM.sleep`."""
        await asyncio.to_thread(self.llm.sleep, level)
        self._sleeping = True

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """See :meth:`LLM.wake_up`."""
        await asyncio.to_thread(self.llm.wake_up)
        self._sleeping = False
        return True

    async def is_sleeping(self) -> bool:
        """Whether :meth:`sleep` was called last."""
        return self._sleeping

    async def check_health(self) -> None:
        """:raises EngineDeadError: the engine died. :raises EngineClosedError: it was closed."""
        self.llm.get_metrics()

    @property
    def errored(self) -> bool:
        """Whether the engine died or was closed."""
        try:
            self.llm.get_metrics()
        except SdkError:
            return True
        return False

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        """The same as :attr:`errored`."""
        return self.errored

    async def do_log_stats(self) -> None:
        """Nothing is logged; ``llm.get_metrics()`` has the numbers."""


AsyncLLM = AsyncLLMEngine


def _check(tokenization_kwargs: Any, mm_processor_kwargs: Any) -> None:
    check_absent(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)


def _template(
    source: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
) -> dict[str, Any]:
    """The keywords of our ``chat``. vLLM shows tools to the model and does not parse calls."""
    given: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template": source,
        "tools": tools or None,
        "chat_template_kwargs": variables,
    }
    return {name: value for name, value in given.items() if value is not None}


def _pooling(given: PoolingParams | None) -> PoolingParams:
    if given is None:
        return PoolingParams()
    if not isinstance(given, PoolingParams):
        raise RequestError(f"pooling_params: expected PoolingParams, found {safe_repr(given)}")
    return given


def _as_tensor(found: ClassificationRequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    import torch

    data = PoolingOutput(torch.tensor(found.outputs.probs))
    return PoolingRequestOutput(found.request_id, data, found.prompt_token_ids, 0, found.finished)
