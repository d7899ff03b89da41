"""``AsyncLLM``: the method names of vLLM's async engine on top of an :class:`sdk.LLM`."""

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

    from sdk.testing.fake_llm import FakeLLM


class AsyncLLM:
    """Async methods for an :class:`LLM`; not a second engine.

    ``AsyncLLM(llm)`` shares ``llm``, which its owner closes. ``AsyncLLM("model.gguf")`` creates
    an LLM (this blocks while the model loads) and closes it.
    """

    @takes_options
    def __init__(
        self, model: LLM | FakeLLM | str | PathLike[str], **options: Unpack[EngineOptions]
    ) -> None:
        given: Any = model
        self.llm: LLM | FakeLLM
        if hasattr(given, "astream"):  # an LLM or a FakeLLM, not a path
            if options:
                raise TypeError(f"AsyncLLM(llm) takes no options, found {sorted(options)}")
            self.llm, self._owned = given, False
        else:
            self.llm, self._owned = LLM(given, **options), True

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
        priority: int | None = None,
        **template: Any,
    ) -> AnswerStream:
        """Stream one answer as vLLM does: every output holds the whole answer so far.

        ``SamplingParams(output_kind=...)`` selects only the new text (``DELTA``, as in
        :meth:`LLM.astream`) or only the last output (``FINAL_ONLY``). ``request_id`` is a name
        for :meth:`abort`; by default requests are numbered.

        :raises RequestError: by the call itself: an invalid request or a ``request_id`` in use.
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
