"""``AsyncLLM``: the asyncio names of vLLM's async engine, as a view on an :class:`sdk.LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from sdk.llm import LLM
from sdk.options import EngineOptions, takes_options
from sdk.params import RequestOutputKind, SamplingParams
from sdk.requests.async_stream import AnswerStream
from sdk.requests.conversations import Message
from sdk.requests.prompts import PromptLike

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncLLM:
    """Awaitable methods over an :class:`LLM`; not a second engine.

    ``AsyncLLM(llm)`` shares ``llm`` and leaves closing to its owner; ``AsyncLLM("model.gguf")``
    makes one (which blocks while it loads) and closes it.
    """

    @takes_options
    def __init__(self, model: LLM | str | PathLike[str], **options: Unpack[EngineOptions]) -> None:
        if isinstance(model, LLM):
            if options:
                raise TypeError(f"AsyncLLM(llm) takes no options, found {sorted(options)}")
            self.llm, self._owned = model, False
        else:
            self.llm, self._owned = LLM(model, **options), True

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the LLM if this view made it."""
        if self._owned:
            self.llm.close()

    def generate(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int | None = None,
        **template: Any,
    ) -> AnswerStream:
        """Stream one answer as vLLM does: every output holds all of the answer so far.

        ``SamplingParams(output_kind=...)`` asks for what is new alone (``DELTA``, as
        :meth:`LLM.astream` gives), or for the last output (``FINAL_ONLY``). ``request_id`` is a
        name for :meth:`abort`; without one the outputs have a number.

        :raises RequestError: at the call, a bad request or a ``request_id`` in use.
        """
        return self.llm._calls.astream(
            "generate",
            prompt,
            sampling_params,
            priority,
            template,
            request_id=request_id,
            kind=RequestOutputKind.CUMULATIVE,
        )

    def abort(self, request_id: str | Sequence[str]) -> None:
        """See :meth:`LLM.abort`."""
        self.llm.abort(request_id)
