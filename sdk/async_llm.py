"""``AsyncLLM``: the method names of vLLM's async engine on top of an :class:`sdk.LLM`.

It has the methods of ``LLM`` that wait for the engine and have no twin there (``agenerate``,
``achat``, ``astream``, ``arun_tools``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from sdk.api.beam_search import BeamSearchOutput, BeamSearchParams
from sdk.api.lora import LoRAInfo, LoRALike, LoRARequest
from sdk.api.options import EngineOptions, takes_options
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.llm import LLM
from sdk.requests.async_stream import AnswerStream
from sdk.requests.pooling.methods import AsyncPoolingMethods
from sdk.requests.prompts.kinds import Message
from sdk.requests.prompts.reader import PromptLike

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncLLM(AsyncPoolingMethods):
    """Async methods for an :class:`LLM`; not a second engine.

    ``AsyncLLM(llm)`` shares ``llm``, which its owner closes. ``AsyncLLM("model.gguf")`` creates
    an LLM (this blocks while the model loads) and closes it.
    """

    @takes_options
    def __init__(self, model: LLM | str | PathLike[str], **options: Unpack[EngineOptions]) -> None:
        given: Any = model
        self.llm: LLM
        if hasattr(given, "astream"):  # an LLM, or what wraps one; not a path
            if options:
                raise TypeError(f"AsyncLLM(llm) takes no options, found {sorted(options)}")
            self.llm, self._owned = given, False
        else:
            self.llm, self._owned = LLM(given, **options), True
        self._pooling, self._job_runner = self.llm._pooling, self.llm._job_runner

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the LLM if this object created it."""
        if self._owned:
            self.llm.close()

    def generate(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AnswerStream:
        """Stream one answer as vLLM does: every output holds the whole answer so far.

        ``SamplingParams(output_kind=...)`` selects only the new text (``DELTA``, as in
        :meth:`LLM.astream`) or only the last output (``FINAL_ONLY``). ``request_id`` is a name
        for :meth:`abort`; by default requests are numbered.

        :raises RequestError: by the call itself: an invalid request or a ``request_id`` in use.
        """
        return self._job_runner.astream(
            "generate",
            prompt,
            sampling_params,
            priority,
            template,
            request_id=request_id,
            kind=RequestOutputKind.CUMULATIVE,
            lora=lora_request,
        )

    async def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        lora_request: LoRALike | None = None,
    ) -> list[BeamSearchOutput]:
        """:meth:`LLM.beam_search`. Cancelling this, or a call below, aborts its requests."""
        llm = self.llm
        work = llm._beam_searches.search(prompts, params, False, lora_request)
        return await self._job_runner.ado(work, prompts, lora_request)

    # The same functions under vLLM's names, without the prefix that tells them apart in LLM.
    embed = AsyncPoolingMethods.aembed
    encode = AsyncPoolingMethods.aencode
    classify = AsyncPoolingMethods.aclassify
    score = AsyncPoolingMethods.ascore
    rerank = AsyncPoolingMethods.arerank

    async def add_lora(
        self,
        lora: LoRARequest | str,
        path: str | PathLike[str] | None = None,
        *,
        pin: bool = False,
    ) -> LoRARequest:
        """:meth:`LLM.add_lora` in a thread."""
        return await asyncio.to_thread(self.llm.add_lora, lora, path, pin=pin)

    async def remove_lora(self, lora: LoRARequest | str | int) -> bool:
        """:meth:`LLM.remove_lora` in a thread."""
        return await asyncio.to_thread(self.llm.remove_lora, lora)

    async def pin_lora(self, lora: LoRARequest | str | int) -> bool:
        """:meth:`LLM.pin_lora` in a thread."""
        return await asyncio.to_thread(self.llm.pin_lora, lora)

    async def list_loras(self) -> list[LoRAInfo]:
        """:meth:`LLM.list_loras`."""
        return self.llm.list_loras()

    def abort(self, request_id: str | Sequence[str]) -> None:
        """See :meth:`LLM.abort`."""
        self.llm.abort(request_id)
