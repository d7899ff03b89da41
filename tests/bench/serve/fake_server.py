"""A server with OpenAI's completions and chats for tests, whose every byte a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: ``await behave(server, request, writer)``; the head of the request is read already.
Behaviour = Callable[["FakeServer", "Asked", asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


def event(text: str, *, chat: bool = False, finish: str | None = None) -> bytes:
    part = {"delta": {"content": text}} if chat else {"text": text}
    choice = {"index": 0, "finish_reason": finish, **part}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def plain(status: int, body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data)


async def answer(server: FakeServer, asked: Asked, writer: asyncio.StreamWriter) -> None:
    """As many words as were asked for, one piece each, and the numbers of tokens."""
    chat = asked.path.endswith("/chat/completions")
    prompt = asked.body["messages"] if chat else asked.body["prompt"]
    count = asked.body["max_tokens"]
    writer.write(HEAD)
    if chat:
        writer.write(chunk(b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'))
    for number in range(count):
        await server.pause()
        writer.write(chunk(event(f" w{number}", chat=chat)))
    words = prompt if isinstance(prompt, str) else " ".join(one["content"] for one in prompt)
    tail = event("", chat=chat, finish="length") + usage(len(words.split()), count) + DONE
    writer.write(chunk(tail) + b"0\r\n\r\n")


@dataclass
class FakeServer:
    """``asked``: the requests; ``connections``: how many were made. An answer is cancelled when the
    client hangs up."""

    behave: Behaviour = answer
    delay_s: float = 0.0
    models: bool = True
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    running: int = 0
    most_running: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def questions(self) -> list[Asked]:
        return [one for one in self.asked if one.method == "POST"]

    async def pause(self) -> None:
        await asyncio.sleep(self.delay_s)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        ended = (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError)
        with contextlib.suppress(*ended):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.split("\r\n")
                method, path, _ = first.split(" ")
                pairs = (line.partition(": ") for line in lines if line)
                headers = {name.lower(): value for name, _, value in pairs}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(method, path, headers, json.loads(data) if data else None)
                self.asked.append(asked)
                if self.models and path.endswith("/models"):
                    writer.write(plain(200, {"data": [{"id": "fake"}]}))
                    continue
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                try:
                    await self._watched(reader, asked, writer)
                finally:
                    self.running -= 1
                if writer.is_closing():
                    break
        writer.close()

    async def _watched(
        self, reader: asyncio.StreamReader, asked: Asked, writer: asyncio.StreamWriter
    ) -> None:
        """Answer; stop when the client closes the connection."""
        answering = asyncio.ensure_future(self.behave(self, asked, writer))
        while not answering.done():
            await asyncio.wait([answering], timeout=0.01)
            if reader.at_eof():
                answering.cancel()
                break
        await asyncio.gather(answering, return_exceptions=True)


@contextlib.contextmanager
def running(server: FakeServer) -> Iterator[FakeServer]:
    """Serves in a thread, as the client's loop is not the server's."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            server.port = listening.sockets[0].getsockname()[1]
            ready.set()
            await stop.wait()
            listening.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def run() -> None:
        loop.run_until_complete(serve())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
