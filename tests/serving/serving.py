"""Servers on loopback sockets, and a client that shows what is on the wire."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from sdk.testing import FakeLLM


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a response that has OpenAI's shape, and nothing else."""
        found = self.json
        assert list(found) == ["error"]
        assert set(found["error"]) == {"message", "type", "param", "code"}
        error: dict[str, Any] = found["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; the last one, [DONE], as that text."""
        lines = [line for line in self.body.decode().split("\n\n") if line]
        data = [line.rpartition("data: ")[2] for line in lines]
        return [one if one == "[DONE]" else json.loads(one) for one in data]


class Client:
    """Requests to one server, each on a connection of its own."""

    def __init__(self, port: int) -> None:
        self.port = port

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            given.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, body, given)
            found = connection.getresponse()
            named = {name.lower(): value for name, value in found.getheaders()}
            return Response(found.status, named, found.read())
        finally:
            connection.close()

    def get(self, path: str, **more: Any) -> Response:
        return self.send("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> Response:
        return self.send("POST", path, body, **more)

    def open(self, path: str, body: Any) -> socket.socket:
        """A connection on which a request was sent and no answer was read."""
        data = json.dumps(body).encode()
        made = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        made.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return made


@contextlib.contextmanager
def running(app: Any, seconds: float = 5) -> Iterator[Client]:
    """A server for ``app`` on a free port, in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=seconds)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield Client(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


Serve = Callable[..., tuple[Client, FakeLLM]]


def eventually(holds: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until something holds that another thread does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
