"""A small HTTP/1.1 client for asyncio: POST and GET, keep-alive, server-sent events.

The client shares a few cores with the server that it measures, so it must cost little. A general
client passes each piece of a stream through four coroutines or more; here one callback of the
transport does everything (docs/bench/load.md has the cost).
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from sdk.api.errors import RequestError

#: The most that is kept of a body that is not a stream of events: an error, or a list of models.
_MAX_BODY = 1 << 20
_MAX_HEAD = 1 << 16


class ProtocolError(Exception):
    """The server's bytes are not HTTP, or it ended the connection within a response."""


class ResponseReader:
    """One response, read piece by piece.

    ``on_event`` gets the data of every server-sent event. ``status``: 0 before the head is there.
    ``body``: what was received, if the response is not a stream of events.
    """

    def __init__(self, on_event: Callable[[bytes], None]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.complete = False
        self._on_event = on_event
        self._events = False
        self._buffer = b""
        #: Bytes left of the chunk (or, without chunks, of the body); -1: until the connection ends.
        self._left = 0
        self._chunked = False
        self._line = b""

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection can take another request."""
        return (
            self.complete
            and self._left >= 0
            and not self._buffer
            and self.headers.get("connection", "").lower() != "close"
        )

    def feed(self, data: bytes) -> None:
        """:raises ProtocolError: this is not a response."""
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        if not self.status:
            data = self._head(data)
            if not self.status:
                return
        if self._chunked:
            self._chunks(data)
        elif self._left < 0:
            self._content(data)
        elif data or self._left == 0:
            content, self._buffer = data[: self._left], data[self._left :]
            self._content(content)
            self._left -= len(content)
            self.complete = self._left == 0

    def end_of_input(self) -> None:
        """The server closed the connection. :raises ProtocolError: within the response."""
        if self.status and self._left < 0 and not self._chunked:
            self.complete = True
        if not self.complete:
            raise ProtocolError("disconnected")

    def _head(self, data: bytes) -> bytes:
        """Read status and headers; the bytes after them."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD or not b"HTTP/1.".startswith(data[:7]):
                raise ProtocolError("not HTTP")
            self._buffer = data
            return b""
        first, *lines = data[:end].decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if not first.startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            raise ProtocolError("not HTTP")
        if words[1].startswith("1"):  # 100 Continue: the response follows
            return self._head(data[end + 4 :])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        self.status = int(words[1])
        self._events = self.headers.get("content-type", "").startswith("text/event-stream")
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length", "")
        if self.status in (204, 304):
            self._left = 0
        else:
            self._left = int(length) if length.isdigit() else -1
        return data[end + 4 :]

    def _chunks(self, data: bytes) -> None:
        """``_left`` counts the chunk's final CRLF; 0 between chunks."""
        self._left = max(self._left, 0)
        position = 0
        while position < len(data):
            if self._left:
                taken = data[position : position + self._left]
                content = len(taken) - max(0, 2 - (self._left - len(taken)))
                if content > 0:
                    self._content(taken[:content])
                self._left -= len(taken)
                position += len(taken)
                continue
            end = data.find(b"\r\n", position)
            if end < 0:
                break
            try:
                size = int(data[position:end].partition(b";")[0], 16)
            except ValueError:
                raise ProtocolError("not HTTP") from None
            if size == 0:
                # Trailers are not used: the response is complete with the empty line.
                if data.find(b"\r\n\r\n", end) < 0:
                    break
                self.complete = True
                return
            position, self._left = end + 2, size + 2
        self._buffer = data[position:]

    def _content(self, data: bytes) -> None:
        if not self._events:
            if len(self.body) < _MAX_BODY:
                self.body += data
            return
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            # Comments, event names and ids are not used, and no server splits its data in lines.
            if line.startswith(b"data:"):
                self._on_event(line[5:].strip())


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self.fresh = True
        self.silent = True
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:  # bytes that nobody asked for
            self.close()
            return
        self.silent = False
        try:
            reader.feed(data)
        except Exception as error:
            self._finish(error)
            return
        if reader.complete:
            self._finish(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._reader is not None:
            try:
                self._reader.end_of_input()
            except ProtocolError as cut:
                self._finish(cut)
            else:
                self._finish(None)

    async def exchange(self, request: bytes, reader: ResponseReader) -> None:
        """Send a request and wait for the end of its response."""
        assert self._transport is not None
        self._reader, self.silent = reader, True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._reader = None
            self.fresh = False
            if not reader.keeps_alive:
                self.close()

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. ``path``: of its API, ``/v1`` unless the URL has another."""

    host: str
    port: int
    secure: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """:raises RequestError: this is not a URL of a server."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port, parts = None, None, urlsplit("")
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.username:
            raise RequestError(
                f"--url: expected http://HOST:PORT or https://HOST:PORT, found {url!r}"
            )
        secure = parts.scheme == "https"
        return cls(host, port or (443 if secure else 80), secure, parts.path.rstrip("/") or "/v1")


class HttpClient:
    """Requests to one server, over as many connections as there are requests at a time."""

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self._address = address
        self._idle: list[_Connection] = []
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = {"Host": f"{host}:{address.port}", "Accept": "*/*", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    @property
    def path(self) -> str:
        """Where the API begins."""
        return self._address.path

    async def get(self, path: str) -> ResponseReader:
        """:raises OSError, ProtocolError:"""
        head = f"GET {self._address.path}{path} HTTP/1.1\r\n{self._head}\r\n"
        return await self._send(head.encode("latin-1"), lambda data: None)

    async def post(
        self, path: str, body: object, on_event: Callable[[bytes], None]
    ) -> ResponseReader:
        """Send JSON. :raises OSError, ProtocolError:"""
        data = json.dumps(body).encode()
        head = (
            f"POST {self._address.path}{path} HTTP/1.1\r\n{self._head}"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return await self._send(head.encode("latin-1") + data, on_event)

    def close(self) -> None:
        """Close idle connections; those in use close when their requests are cancelled."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, request: bytes, on_event: Callable[[bytes], None]) -> ResponseReader:
        while True:
            connection = await self._connection()
            reader = ResponseReader(on_event)
            again = not connection.fresh
            try:
                await connection.exchange(request, reader)
            except ProtocolError:
                # The server may close an idle connection just when it is used again: then it has
                # not answered with a single byte, and the request is sent once more.
                if again and connection.silent:
                    continue
                raise
            if not connection.closed:
                self._idle.append(connection)
            return reader

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self._address.secure else None
        _, made = await loop.create_connection(
            _Connection, self._address.host, self._address.port, ssl=context
        )
        return made
