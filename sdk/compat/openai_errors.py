"""The errors of the ``openai`` package, raised for ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from sdk.api.errors import (
    EngineClosedError,
    EngineDeadError,
    OutOfMemoryError,
    RequestError,
    SdkError,
    UnsupportedError,
)


class OpenAIError(SdkError):
    """The base of these errors."""


class APIError(OpenAIError):
    """A request failed. ``message`` and ``body`` are those of openai's errors."""

    code: ClassVar[str | None] = None
    type: ClassVar[str | None] = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.param: str | None = None
        self.body = {"message": message, "type": self.type, "param": None, "code": self.code}


class APIConnectionError(APIError):
    """The engine is closed or dead."""


class APITimeoutError(APIConnectionError):
    """The ``timeout`` of a request has passed."""


class APIStatusError(APIError):
    """A server would have answered with ``status_code``."""

    status_code: ClassVar[int] = 500


class BadRequestError(APIStatusError):
    """An argument is invalid."""

    status_code = 400
    type = "invalid_request_error"


class InternalServerError(APIStatusError):
    """The request failed while it ran."""

    status_code = 500
    type = "server_error"


@contextmanager
def openai_errors() -> Iterator[None]:
    """Turn our errors into those of openai; the cause is ours."""
    try:
        yield
    except OpenAIError:
        raise
    except (RequestError, UnsupportedError) as error:
        raise BadRequestError(str(error)) from error
    except (EngineClosedError, EngineDeadError) as error:
        raise APIConnectionError(str(error)) from error
    except (OutOfMemoryError, SdkError) as error:
        raise InternalServerError(str(error)) from error
