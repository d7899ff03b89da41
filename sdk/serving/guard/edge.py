"""What every request passes before the application: limits, origins, the gate, the body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from sdk.serving.access import Access, Refused
from sdk.serving.guard.deadline import Deadline
from sdk.serving.guard.gate import Gate
from sdk.serving.guard.http_limits import HttpLimits, check_path
from sdk.serving.guard.json_depth import check_depth
from sdk.serving.guard.origins import Origins
from sdk.serving.guard.responses import (
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
    error_headers,
)
from sdk.serving.interfaces import interface_of

_LOG = logging.getLogger("sdk.serving")
#: Added to responses that do not have these headers.
_SECURITY = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
        b"form-action 'none'; frame-ancestors 'none'",
    ),
)
_SECURITY_NAMES = frozenset(name for name, _ in _SECURITY)
_RATES = [f"x-ratelimit-{what}" for what in ("limit", "remaining", "reset")]
_EXPOSED = [f"{rate}-{what}" for rate in _RATES for what in ("requests", "tokens")]
_EXPOSED += ["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"]
#: A refused body of this size is read before the answer, if it comes within this time (clients
#: send it with the head), so that the connection stays usable.
_SMALL_BODY = 64 * 2**10
_SMALL_SECONDS = 0.25
#: For so long, and this many bytes, a larger refused body is read after the answer: if the
#: connection were closed at once, the client could lose the answer (RFC 9112, section 9.6).
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 64 * 2**20


#: Types of streams whose last part may be an error.
_STREAMS = (b"text/event-stream", b"application/x-ndjson")


class _ClientGone(Exception):
    """The client closed the connection while it sent the body."""


class Edge:
    """An ASGI application around another one.

    For every request: sizes of the head, Host and Origin, the path; security headers on the
    response, and no traceback in it. For requests with a body (all methods but GET, HEAD and
    OPTIONS) also, in this order: a place in the :class:`Gate`; ``access.enter``, so that nobody
    unknown can send a body; the body, completely, within its limits of size, time and depth. Only
    then the application runs, so slow senders occupy none of its time.

    The application may call ``access.enter`` again: it is the same question.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access | None = None,
        limits: HttpLimits | None = None,
        origins: Origins | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._app = app
        self._access = access
        self._limits = limits or HttpLimits()
        self._origins = origins or Origins()
        self._buffered = 0
        self.gate = gate or Gate(self._limits.requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        response = _Response(send)
        request = _Request(scope, receive)
        try:
            self._check_head(scope)
            if scope["method"] in ("GET", "HEAD", "OPTIONS"):
                await self._app(scope, receive, response.send)
            else:
                await self._with_body(request, response)
        except Refused as refused:
            if response.started:
                raise  # the application's own mistake
            await _refuse(refused, request, response)
        except _ClientGone:
            pass
        except Exception:
            _LOG.exception("an exception in the application: %s %r", scope["method"], scope["path"])
            if not response.started:
                internal = Refused(
                    500, "The server made an error; its log has details.", "internal_error"
                )
                await _refuse(internal, request, response)
            elif not response.complete:
                raise  # the server closes the connection, so the client notices

    def _check_head(self, scope: Scope) -> None:
        target = (scope.get("raw_path") or b"", scope.get("query_string") or b"")
        self._limits.check_head(target, scope["headers"])
        self._origins.check(scope["headers"])
        check_path(scope["path"])

    async def _with_body(self, request: _Request, response: _Response) -> None:
        scope, limits = request.scope, self._limits
        entered = self.gate.enter()
        try:
            if self._access is not None:
                await self._access.enter(scope["headers"], scope.get("client"))
            limits.check_length(scope["headers"])
            body = await self._read(request)
            if limits.request_seconds is None:
                await self._app(scope, request.replay(body), response.send)
            else:
                await self._in_time(request.replay(body), limits.request_seconds, request, response)
        finally:
            self._buffered -= request.size
            self.gate.leave(entered)

    async def _in_time(
        self, receive: Receive, seconds: float, request: _Request, response: _Response
    ) -> None:
        """Run the application; when the time is over, the client has gone as far as it knows."""
        late = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(seconds, late.set)

        async def receive_in_time() -> Message:
            reading = asyncio.ensure_future(receive())
            waiting = asyncio.ensure_future(late.wait())
            try:
                await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
                return reading.result() if reading.done() else {"type": "http.disconnect"}
            finally:
                reading.cancel()
                waiting.cancel()

        async def send_in_time(message: Message) -> None:
            if not late.is_set():
                await response.send(message)

        try:
            await self._app(request.scope, receive_in_time, send_in_time)
        finally:
            timer.cancel()
        if late.is_set() and not response.complete:
            await _end_late(seconds, request, response)

    async def _read(self, request: _Request) -> bytes:
        """The whole body. :raises Refused: 400, 408, 413 or 429."""
        limits, chunks = self._limits, list[bytes]()
        deadline = Deadline(limits.body_seconds)
        try:
            async with deadline:
                while not request.body_read:
                    chunk = await request.next_chunk()
                    request.size += len(chunk)
                    self._buffered += len(chunk)
                    chunks.append(chunk)
                    if request.size > limits.body_bytes:
                        raise limits.too_large()
                    if self._buffered > limits.buffered_bytes:
                        message = "The server holds too many large requests. Try again in 1 s."
                        raise Refused(429, message, "server_busy", {"retry-after": "1"})
        except TimeoutError:
            if not deadline.over:
                raise
            raise Refused(
                408,
                f"The body was not complete after {limits.body_seconds:g} s.",
                "body_timeout",
            ) from None
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        check_depth(body, limits.json_depth)
        return body


def protected(
    app: ASGIApp,
    *,
    access: Access | None = None,
    limits: HttpLimits | None = None,
    origins: Origins | None = None,
    gate: Gate | None = None,
) -> ASGIApp:
    """``app`` behind an :class:`Edge`; pages of ``origins.allowed`` may read responses (CORS).

    ``gate``: one that :func:`~sdk.serving.guard.connections.uvicorn_options` has too.

    :raises ModuleNotFoundError: origins are allowed and starlette is not installed.
    """
    edge = Edge(app, access=access, limits=limits, origins=origins, gate=gate)
    if origins is None or not origins.allowed:
        return edge
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        edge,
        allow_origins=sorted(origins.allowed),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=600,
    )


class _Request:
    """The request as it is read."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope = scope
        self._receive = receive
        #: The announced length of the body; -1 if it is not known (chunked).
        self.length = 0
        self.waits_for_continue = False
        self.body_read = False
        #: What counts as held: the bytes of the body that were read and not refused.
        self.size = 0
        for name, value in scope["headers"]:
            if name == b"content-length":
                self.length = int(value) if value.isdigit() and len(value) < 17 else -1
            elif name == b"transfer-encoding":
                self.length = -1
            elif name == b"expect":
                self.waits_for_continue = True

    async def next_chunk(self) -> bytes:
        """The next part of the body. :raises _ClientGone: the connection was closed."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _ClientGone
        self.body_read = not message.get("more_body", False)
        chunk: bytes = message.get("body", b"")
        return chunk

    async def discard(self, seconds: float, most: int) -> None:
        """Read the rest of the body and forget it, for at most ``seconds`` and ``most`` bytes."""
        deadline = Deadline(seconds)
        try:
            async with deadline:
                while not self.body_read and most > 0:
                    most -= len(await self.next_chunk())
        except TimeoutError:
            if not deadline.over:
                raise

    def replay(self, body: bytes) -> Receive:
        """``receive`` for an application: first the body, then what the server sends."""
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return first.pop() if first else await self._receive()

        return receive


class _Response:
    """The response as it is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.complete = False
        self.is_stream = False

    async def send(self, message: Message) -> None:
        """Send on; adds the security headers."""
        if message["type"] == "http.response.start":
            self.started = True
            message = {**message, "headers": self._with_security(message.get("headers", ()))}
        elif not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    def _with_security(self, headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        result = list(headers)
        present = {name.lower() for name, _ in result}
        self.is_stream = any(
            name.lower() == b"content-type" and value.startswith(_STREAMS) for name, value in result
        )
        if present.isdisjoint(_SECURITY_NAMES):
            result += _SECURITY
        else:
            result += (header for header in _SECURITY if header[0] not in present)
        return result


async def _refuse(refused: Refused, request: _Request, response: _Response) -> None:
    """Send the error; leave the connection usable where that costs little, else close it."""
    try:
        # A body that was late already is not waited for, nor one that was not sent yet.
        waits = not (request.waits_for_continue or refused.status == 408)
        small = 0 <= request.length <= _SMALL_BODY
        if request.length and small and waits:
            await request.discard(_SMALL_SECONDS, _SMALL_BODY)
        close = bool(request.length) and not request.body_read
        body = interface_of(request.scope["path"]).error(refused)
        headers = error_headers(refused, body, close=close)
        await response.send(
            {"type": "http.response.start", "status": refused.status, "headers": headers}
        )
        if close and not small and waits:
            # The client has the whole answer now (Content-Length), and reads it when it likes.
            await response.send({"type": "http.response.body", "body": body, "more_body": True})
            body = b""
            await request.discard(_LINGER_SECONDS, _LINGER_BYTES)
        await response.send({"type": "http.response.body", "body": body, "more_body": False})
    except _ClientGone:
        pass


async def _end_late(seconds: float, request: _Request, response: _Response) -> None:
    """The time for the request is over, and the application has ended."""
    message = f"The response was not complete after {seconds:g} s."
    late = Refused(504, message, "deadline_exceeded")
    if not response.started:
        await _refuse(late, request, response)
    elif response.is_stream:
        interface = interface_of(request.scope["path"])
        event = interface.last(interface.error(late))
        await response.send({"type": "http.response.body", "body": event, "more_body": False})
    else:
        raise TimeoutError(message)  # uvicorn closes the connection, so the client notices
