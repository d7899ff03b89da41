"""Limits of connections that uvicorn does not have: number, heads, clients that do not read."""

from __future__ import annotations

import asyncio
import re
from typing import Any, cast

from sdk.serving.access import Refused
from sdk.serving.guard.gate import Gate
from sdk.serving.guard.http_limits import HttpLimits
from sdk.serving.guard.responses import error_headers
from sdk.serving.interfaces import OPENAI

#: How long a connection that is one too many may take to send something, and gets its answer.
_LINGER_SECONDS = 1.0
_LENGTH = re.compile(rb"\r\ncontent-length: ?([0-9]{1,9})\r\n")
#: Headers whose requests take the long way.
_SPECIAL = re.compile(rb"\r\n(?:transfer-encoding|expect|connection|upgrade|origin|[ \t])")


class LimitedConnection(asyncio.Protocol):
    """One connection: passes everything to uvicorn's protocol and watches the clock and sizes.

    uvicorn closes a connection that is idle after a response, but not one that never sends a
    complete head; and with httptools the headers of one request may take any amount of memory.
    A step of the response costs nothing here: uvicorn writes to the transport itself.

    While the ``gate`` is full, a whole request in one piece is refused here. The way through
    uvicorn and the application has the same result, but takes about four times as long (it writes
    head and body of the response in two system calls), and a burst may be of a thousand requests.
    """

    def __init__(self, limits: HttpLimits, gate: Gate | None, inner: Any, state: Any) -> None:
        self._limits = limits
        self._gate = gate
        self._inner = inner
        self._state = state
        self._transport: asyncio.Transport | None = None
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._one_too_many = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has its own base class
        self._one_too_many = len(self._state.connections) >= self._limits.connections
        if self._one_too_many:
            self._start_timer(_LINGER_SECONDS)
            return
        self._inner.connection_made(transport)
        self._start_timer(self._limits.head_seconds)

    def data_received(self, data: bytes) -> None:
        if self._one_too_many:
            self._answer(
                Refused(
                    503,
                    f"The server has {self._limits.connections} connections. Try again in 1 s.",
                    "server_busy",
                    {"retry-after": "1"},
                )
            )
            return
        if self._gate is not None and self._gate.full and self._between() and is_whole_post(data):
            self._stop_timer()
            if self._inner.timeout_keep_alive_task is not None:
                self._inner.timeout_keep_alive_task.cancel()
                self._inner.timeout_keep_alive_task = None
            self._write(self._gate.refusal(), close=False)
            self._start_timer(self._limits.idle_seconds)
            return
        before = self._inner.cycle
        in_body = before is not None and before.more_body
        self._inner.data_received(data)
        if self._inner.cycle is not before:  # the head of a request is complete
            self._head_bytes = 0
            self._stop_timer()
        elif not in_body:  # the beginning of a head
            self._head_bytes += len(data)
            if self._timer is None:
                self._start_timer(self._limits.head_seconds)
            if self._head_bytes > self._limits.head_bytes + self._limits.target_bytes:
                message = f"The headers are longer than {self._limits.head_bytes} bytes."
                self._answer(Refused(431, message, "headers_too_large"))

    def eof_received(self) -> bool | None:
        if self._one_too_many:
            return None
        result: bool | None = self._inner.eof_received()
        return result

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.resume_writing()
        if not self._one_too_many:
            self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read: 64 KiB wait."""
        if not self._one_too_many:
            self._inner.pause_writing()
        if self._stalled is None and self._transport is not None:
            loop = asyncio.get_running_loop()
            self._stalled = loop.call_later(self._limits.stalled_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        if not self._one_too_many:
            self._inner.resume_writing()

    def _start_timer(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self._transport is None or self._transport.is_closing():
            return
        if self._head_bytes and not self._busy():
            seconds = self._limits.head_seconds
            message = f"The head of the request was not complete after {seconds:g} s."
            self._answer(Refused(408, message, "head_timeout"))
        elif self._busy():  # a client that sends its next request before it has this response
            self._start_timer(self._limits.head_seconds)
        else:  # nothing came: there is no request to answer
            self._transport.close()

    def _between(self) -> bool:
        """Whether the last request and its response are complete, and no other has begun."""
        cycle = self._inner.cycle
        done = cycle is None or (cycle.response_complete and not cycle.more_body)
        return done and self._head_bytes == 0

    def _busy(self) -> bool:
        """Whether a response is being sent: another one must not be written into it."""
        cycle = self._inner.cycle
        return cycle is not None and not cycle.response_complete

    def _answer(self, refused: Refused) -> None:
        """Answer without uvicorn, and close the connection."""
        if self._transport is not None and not self._transport.is_closing():
            if not self._busy():
                self._write(refused, close=True)
            self._transport.close()

    def _write(self, refused: Refused, *, close: bool) -> None:
        assert self._transport is not None
        body = OPENAI.error(refused)  # the path is not known
        lines = [f"HTTP/1.1 {refused.status} {refused.code}".encode()]
        headers = error_headers(refused, body, close=close)
        lines += [name + b": " + value for name, value in headers]
        self._transport.write(b"\r\n".join([*lines, b"", body]))


def is_whole_post(data: bytes) -> bool:
    """Whether ``data`` is exactly one POST request, which any program would end at the same byte.

    If there is any doubt (a proxy may read it in another way), or the answer needs headers of its
    own (CORS, 100-continue, close), it is not.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0 or not data.startswith(b"POST /"):
        return False
    head = data[: end + 2].lower()
    if head.count(b"\n") != head.count(b"\r\n") or head.count(b"content-length") != 1:
        return False
    length = _LENGTH.search(head)
    return (
        length is not None
        and len(data) == end + 4 + int(length[1])
        and b" http/1.1\r\n" in head[: head.find(b"\n") + 1]
        and _SPECIAL.search(head) is None
    )


def _with_target(protocol: Any) -> Any:
    """uvicorn's protocol, where the host of a request's target is that of the header Host.

    ``GET http://other/ HTTP/1.1`` asks for ``other`` whatever Host says (RFC 9112, 3.2.2). With
    httptools uvicorn forgets it; with h11 such a target is a path, which is refused.
    """
    if not hasattr(protocol, "on_url"):
        return protocol

    class WithTarget(protocol):  # type: ignore[misc]
        def on_headers_complete(self) -> None:
            if not self.url.startswith((b"/", b"*")):
                import httptools

                target = httptools.parse_url(self.url)
                if target.host is not None:
                    port = b"" if target.port is None else b":%d" % target.port
                    host = b"[%b]" % target.host if b":" in target.host else target.host
                    self.headers[:] = [
                        (name, host + port if name == b"host" else value)
                        for name, value in self.headers
                    ]
            super().on_headers_complete()

    return WithTarget


def uvicorn_options(limits: HttpLimits, gate: Gate | None = None) -> dict[str, Any]:
    """Options for ``uvicorn.run`` or ``uvicorn.Config``: the limits, and no version in responses.

    ``gate``: that of the :class:`~sdk.serving.guard.edge.Edge`; then requests beyond it are refused
    before they are parsed.

    :raises ModuleNotFoundError: uvicorn is not installed (extra ``server``).
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol  # httptools if it is there, or h11

    implementation = _with_target(AutoHTTPProtocol)

    def protocol(*, server_state: Any, **arguments: Any) -> LimitedConnection:
        inner = implementation(server_state=server_state, **arguments)
        return LimitedConnection(limits, gate, inner, server_state)

    return {
        "http": protocol,
        "ws": "none",
        "timeout_keep_alive": limits.idle_seconds,
        "backlog": limits.connections,
        "server_header": False,
    }
