"""The target in this process: an ``LLM``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from sdk.api.errors import SdkError
from sdk.api.outputs import RequestOutput
from sdk.api.params import SamplingParams
from sdk.bench.serve.load import Prompt, RequestFailed
from sdk.bench.serve.record import Record


class Streams(Protocol):
    """What a load needs of an ``LLM``."""

    def astream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]: ...


class InProcess:
    """Answers by ``LLM.astream``. ``sampling``: more parameters of every request."""

    def __init__(self, llm: Streams, *, ignore_eos: bool = True, **sampling: Any) -> None:
        self._llm = llm
        self._params = SamplingParams(**{"temperature": 0.0, **sampling}, ignore_eos=ignore_eos)

    async def ask(self, prompt: Prompt, output_len: int, record: Record) -> None:
        """See :class:`sdk.bench.serve.load.Target`."""
        record.sent = time.monotonic()
        try:
            stream = self._llm.astream(prompt, self._params.clone(max_tokens=output_len))
            async for piece in stream:
                answer = piece.outputs[0]
                record.output_tokens += len(answer.token_ids)
                if answer.text:
                    record.add(time.monotonic(), answer.text)
        except SdkError as error:
            raise RequestFailed(type(error).__name__, str(error)) from error
        if answer.finish_reason not in ("stop", "length"):
            raise RequestFailed(
                f"finish reason {answer.finish_reason}", str(answer.stop_reason or "")
            )
        record.prompt_tokens = len(piece.prompt_token_ids)
        times = piece.metrics
        if times is not None and times.scheduled_ts is not None:
            record.queue_s = times.scheduled_ts - times.queued_ts
