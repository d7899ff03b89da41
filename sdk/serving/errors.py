"""The error response to whatever went wrong, wherever."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from sdk.api.errors import (
    EngineAsleepError,
    EngineClosedError,
    EngineDeadError,
    OutOfMemoryError,
    RequestError,
    SdkError,
    UnsupportedError,
)
from sdk.api.outputs import CompletionOutput
from sdk.serving.access import Refused
from sdk.serving.openai.requests import param_of

#: What the message of a prompt that does not fit contains (sdk/requests/prompts/reader.py).
_TOO_LONG = ("the context holds", "of the context's")
#: Clients such as litellm look for OpenAI's own words.
_CONTEXT = " (this model's maximum context length is exceeded)"


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """What a request that failed is answered; an ``Interface`` writes its body."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class AnswerError(SdkError):
    """An answer did not end by itself."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


def check_ended(answer: CompletionOutput) -> None:
    """:raises AnswerError: the answer was aborted, or failed."""
    if answer.finish_reason == "error":
        raise AnswerError(f"the request failed: {answer.stop_reason}")
    if answer.finish_reason == "abort":
        raise AnswerError("the request was aborted by the server", 503)


def error_response(error: Exception) -> ErrorResponse | None:
    """The response for an error; ``None``: it is none of ours, and nobody may see its message."""
    if isinstance(error, Refused):
        return ErrorResponse(error.status, error.message, error.code, error.param, error.headers)
    if isinstance(error, AnswerError):
        return ErrorResponse(error.status, str(error))
    if isinstance(error, EngineAsleepError):
        return ErrorResponse(503, str(error), "model_asleep", headers={"Retry-After": "10"})
    wait = getattr(error, "expected_wait", None)
    if wait is not None:  # the queue is full
        seconds = max(1, math.ceil(wait)) if math.isfinite(wait) else 60
        return ErrorResponse(429, str(error), "queue_full", headers={"Retry-After": str(seconds)})
    if isinstance(error, RequestError | UnsupportedError):
        message = str(error)
        param, code = param_of(message), None
        if any(words in message for words in _TOO_LONG):
            code = "context_length_exceeded"
            message += _CONTEXT
        return ErrorResponse(400, message, code, param)
    if isinstance(error, EngineClosedError | EngineDeadError):
        return ErrorResponse(503, str(error), "model_unavailable")
    if isinstance(error, OutOfMemoryError | SdkError):
        return ErrorResponse(500, str(error))
    return None


#: For errors that are bugs: details are in the log, not in the response.
INTERNAL = ErrorResponse(500, "internal error; the server's log has more", "internal_error")
STOPPING = ErrorResponse(503, "the server is stopping", "stopping", headers={"Connection": "close"})
