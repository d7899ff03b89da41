"""The APIs that the server speaks, as far as they differ around a route: errors and content types.

The edge refuses a request before a route knows of it, so the API is found by the path.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol


class Failure(Protocol):
    """What became of a request: ``Refused`` or ``ErrorResponse``."""

    @property
    def status(self) -> int: ...
    @property
    def message(self) -> str: ...
    @property
    def code(self) -> str | None: ...
    @property
    def param(self) -> str | None: ...


class Interface(NamedTuple):
    """``error``: the body of a response that failed. ``last``: the same at the end of a stream that
    has begun. ``any_type``: bodies need no content type where no browser sends them."""

    error: Callable[[Failure], bytes]
    last: Callable[[bytes], bytes]
    any_type: bool = False


_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
    }
)
#: Anthropic's types where they are others.
_ANTHROPIC_TYPES: Mapping[int, str] = MappingProxyType(
    {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
)


def _type(status: int) -> str:
    return _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")


def _openai(failure: Failure) -> bytes:
    error = {
        "message": failure.message,
        "type": _type(failure.status),
        "param": failure.param,
        "code": failure.code,
    }
    return json.dumps({"error": error}).encode()


def _ollama(failure: Failure) -> bytes:
    return json.dumps({"error": failure.message}).encode()


def _anthropic(failure: Failure) -> bytes:
    kind = _ANTHROPIC_TYPES.get(failure.status) or _type(failure.status)
    kind = "api_error" if kind == "server_error" else kind
    error: dict[str, Any] = {"type": kind, "message": failure.message}
    return json.dumps({"type": "error", "error": error}).encode()


OPENAI = Interface(_openai, lambda body: b"data: " + body + b"\n\ndata: [DONE]\n\n")
OLLAMA = Interface(_ollama, lambda body: body + b"\n", any_type=True)
ANTHROPIC = Interface(_anthropic, lambda body: b"event: error\ndata: " + body + b"\n\n")


def interface_of(path: str) -> Interface:
    """The API of a path, which may begin with that of the host's mount."""
    *_, before, last = ["", *path.split("/")]
    if before == "api" or path.rpartition("/api/blobs/")[1]:
        return OLLAMA
    if last == "messages" or path.endswith("/messages/count_tokens"):
        return ANTHROPIC
    return OPENAI
