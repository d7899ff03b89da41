"""Types of ASGI, and the headers of the edge's errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sdk.serving.access import Refused

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]


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
