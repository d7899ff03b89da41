"""Real servers on loopback sockets, and clients that send any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from sdk.serving.guard import Gate, HttpLimits, uvicorn_options


@contextlib.contextmanager
def serving(app: Any, limits: HttpLimits | None = None, gate: Gate | None = None) -> Iterator[int]:
    """Serves ``app`` in a thread; the port."""
    options = uvicorn_options(limits or HttpLimits(), gate)
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", **options)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        listener.close()


@dataclass
class Reply:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        value: dict[str, Any] = json.loads(self.body)["error"]
        assert set(value) == {"message", "type", "param", "code"}
        return value


class Connection:
    """A socket that sends what it is told and reads responses."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def reply(self) -> Reply:
        """The next response; it must have a Content-Length or end with the connection."""
        line = self._file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {}
        while (text := self._file.readline().decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = text.partition(":")
            headers[name.lower()] = value.strip()
        if line.split()[1] == b"100":
            return Reply(100, headers, b"")
        length = headers.get("content-length")
        body = self._file.read() if length is None else self._file.read(int(length))
        return Reply(int(line.split()[1]), headers, body)

    def closed(self) -> bool:
        """Whether the server closes the connection without sending more."""
        try:
            return self._file.read(1) == b""
        except ConnectionError:
            return True


def post(
    body: bytes = b"{}",
    path: str = "/echo",
    *headers: str,
    host: str = "localhost",
    length: bool = True,
) -> bytes:
    """The bytes of a request."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json"]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + body


def ask(port: int, request: bytes) -> Reply:
    """One request on a connection of its own."""
    with Connection(port) as connection:
        connection.send(request)
        return connection.reply()


@dataclass
class App:
    """An application that does what the last part of the path says."""

    #: What it was asked, in order.
    paths: list[str] = field(default_factory=list)
    #: Whether the client of a request has gone.
    gone: threading.Event = field(default_factory=threading.Event)
    #: Ends the requests of ``/wait``.
    release: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.paths.append(scope["path"])
        body, more = b"", scope["method"] == "POST"
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        action = scope["path"].rpartition("/")[2]
        if action == "raise":
            raise RuntimeError("a secret of the host")
        while action == "wait" and not self.release.is_set():
            await asyncio.sleep(0.005)
        if action == "late":
            assert (await receive())["type"] == "http.disconnect"
            self.gone.set()
            return
        if action in ("stream", "flood", "raise-late"):
            await self._stream(action, receive, send)
        else:
            length = str(len(body)).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", length)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, action: str, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.ensure_future(receive())
        data = b"x" * 65536 if action == "flood" else b"data: 1\n\n"
        while not gone.done():
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if action == "raise-late":
                raise RuntimeError("a secret of the host")
            await asyncio.sleep(0 if action == "flood" else 0.02)
        self.gone.set()
