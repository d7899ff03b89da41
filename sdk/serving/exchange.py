"""One HTTP request and its response, on plain ASGI: no object per chunk but the message itself."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.serving.access import Caller, Client, Headers, Refused
from sdk.serving.errors import ErrorResponse
from sdk.serving.interfaces import Interface
from sdk.serving.json_numbers import Numbers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_JSON = b"application/json"
#: What clients send that name no type; the others are what curl and aiohttp add by themselves.
_UNTYPED = (b"", b"application/x-www-form-urlencoded", b"application/octet-stream")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class ClientGone(Exception):
    """The client has closed the connection before its request was complete."""


class Exchange:
    """A request, and the response to it, which is whole or a stream.

    ``check``: raises ``Refused`` for a body with more than is allowed (the limits of a server).
    ``id`` is in the header ``x-request-id`` of the response: the client's own, if it sent one.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        check: Callable[[dict[str, Any]], None] | None,
        interface: Interface,
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._check = check
        self.body: dict[str, Any] | None = None  # once it was read
        self.began = time.monotonic()
        self.status = 0  # 0: the response has not begun
        self.caller = Caller()
        self.interface = interface
        #: For the response, in addition to the usual ones.
        self.headers: dict[str, str] = {}
        given = self.header(b"x-request-id") or b""
        self.id = given.decode() if _ID.fullmatch(given) else uuid.uuid4().hex

    # ---- the request -----------------------------------------------------------------------------

    @property
    def request_headers(self) -> Headers:
        headers: Headers = self._scope["headers"]
        return headers

    @property
    def client(self) -> Client:
        found = self._scope.get("client")
        return None if found is None else (found[0], found[1])

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header; ``name`` in lower case."""
        for key, value in self._scope["headers"]:
            if key == name:
                found: bytes = value
                return found
        return None

    @property
    def path(self) -> str:
        found: str = self._scope["path"]
        return found

    def path_parameter(self, name: str) -> str:
        """A part of the path that the route names."""
        found: str = self._scope["path_params"][name]
        return found

    async def read(self, most: int) -> bytes:
        """The body. :raises Refused: it has more than ``most`` bytes. :raises ClientGone: it ends
        early."""
        too_large = Refused(413, f"body: expected at most {most} bytes", "request_too_large")
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and len(length) < 20 and int(length) > most:
            raise too_large
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise too_large
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts)

    async def read_json(self, most: int) -> dict[str, Any]:
        """The body, an object. :raises Refused: it is not JSON. :raises RequestError: no object."""
        kind = (self.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        untyped = self.interface.any_type and kind in _UNTYPED and not self._from_browser()
        if kind != _JSON and not kind.endswith(b"+json") and not untyped:
            # Also a protection: other pages in a browser can send any other type without asking.
            raise Refused(
                415,
                "content-type: expected application/json (curl: -H 'Content-Type: "
                f"application/json'), found {kind.decode('latin-1')[:80]!r}",
                "unsupported_media_type",
            )
        text = await self.read(most)
        numbers = Numbers()
        try:
            value = json.loads(text, parse_constant=_no_constant, parse_float=numbers.read)
        except RecursionError:
            raise Refused(400, "body: it is nested too deeply", "invalid_json") from None
        except (ValueError, UnicodeDecodeError) as error:
            raise Refused(400, f"body: expected JSON: {error}", "invalid_json") from None
        if not isinstance(value, dict):
            raise RequestError(f"body: expected a JSON object, found {safe_repr(value)}")
        numbers.check(value)
        if self._check is not None:
            self._check(value)
        self.body = value
        return value

    def _from_browser(self) -> bool:
        """Whether a page may have sent it: browsers add these headers, and pages cannot leave them
        out of a request that has a body."""
        return any(name in (b"origin", b"sec-fetch-site") for name, _ in self.request_headers)

    async def wait_for_disconnect(self) -> None:
        """Return when the client has gone. Only after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # ---- the response ----------------------------------------------------------------------------

    async def respond(
        self,
        body: bytes,
        status: int = 200,
        kind: bytes = _JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole response."""
        length = str(len(body)).encode()
        await self._start(status, [(b"content-type", kind), (b"content-length", length)], headers)
        await self._send({"type": "http.response.body", "body": body})

    async def respond_json(self, value: object, status: int = 200) -> None:
        """Send a value as JSON."""
        await self.respond(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"), status)

    async def fail(self, error: ErrorResponse) -> None:
        """Send an error: as the response, or in a stream that has begun as its last event."""
        body = self.interface.error(error)
        if not self.status:
            await self.respond(body, error.status, headers=error.headers)
        else:
            await self.end(self.interface.last(body))

    async def stream(self, kind: list[tuple[bytes, bytes]] = _EVENTS) -> None:
        """Begin a stream, of server-sent events by default."""
        await self._start(200, kind, None)

    async def write(self, data: bytes) -> None:
        """Send the next part of a stream; waits while the client is slow."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """End a stream."""
        await self._send({"type": "http.response.body", "body": data})

    async def _start(
        self,
        status: int,
        headers: list[tuple[bytes, bytes]],
        more: Mapping[str, str] | None,
    ) -> None:
        self.status = status
        mine = {"x-request-id": self.id, **self.headers, **(more or {})}
        named = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in mine.items()]
        start = {"type": "http.response.start", "status": status, "headers": [*headers, *named]}
        await self._send(start)


class Departure:
    """Cancels the task that serves a request when its client has gone.

    A context manager; the body of the request must have been read. Inside, the cancellation is an
    ordinary ``CancelledError``; the ``with`` statement turns it into :class:`ClientGone`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watch = asyncio.ensure_future(self._wait())

    async def _wait(self) -> None:
        await self._exchange.wait_for_disconnect()
        self._gone = True
        self._task.cancel()

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._watch.cancel()
        if not self._gone:
            return
        if hasattr(self._task, "uncancel"):  # Python 3.11
            self._task.uncancel()
        if error is None or isinstance(error, asyncio.CancelledError):
            raise ClientGone from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
