"""Responses of the server's edge, in OpenAI's error shape."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sdk.server.access import Refused

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


def error_type(status: int) -> str:
    """OpenAI's ``type`` of an error."""
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def error_body(refused: Refused) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}``."""
    error = {
        "message": refused.message,
        "type": error_type(refused.status),
        "param": refused.param,
        "code": refused.code,
    }
    return json.dumps({"error": error}).encode()


def error_headers(refused: Refused, body: bytes, *, close: bool) -> list[tuple[bytes, bytes]]:
    """The headers of an error; ``close``: the connection cannot be used for another request."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(
            (name.lower().encode(), value.encode("latin-1"))
            for name, value in refused.headers.items()
        ),
    ]
    return [*headers, (b"connection", b"close")] if close else headers
