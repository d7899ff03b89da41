"""vLLM's engine for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING, Any

from sdk import AsyncLLM as _OurAsyncLLM
from sdk.api.errors import SdkError
from sdk.compat.vllm._missing import missing
from sdk.compat.vllm.engine.arg_utils import EngineArgs
from sdk.compat.vllm.entrypoints.llm import LLM
from sdk.compat.vllm.inputs import check_absent, our_prompt
from sdk.compat.vllm.lora.request import LoRARequest
from sdk.compat.vllm.outputs import (
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    request_output,
)
from sdk.compat.vllm.pooling_params import PoolingParams
from sdk.compat.vllm.sampling_params import SamplingParams
from sdk.requests.adapters import as_ours
from sdk.tokenizer import LLMTokenizer


class AsyncLLM:
    """vLLM's engine for an event loop: ``AsyncLLM.from_engine_args(AsyncEngineArgs(...))``.

    ``AsyncLLM(llm)`` shares an :class:`LLM`, which its owner closes.
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
    ) -> AsyncLLM:
        """An engine with these options. This blocks while the model loads."""
        options = dict(vars(engine_args))
        options.pop("enable_log_requests", None)
        engine = cls(LLM(**options))
        engine._owned = True
        return engine

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """What to do instead of a method that vLLM has."""
            raise missing("AsyncLLMEngine", name)

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
