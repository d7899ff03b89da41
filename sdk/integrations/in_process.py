"""Requests to the application of ``embedlm serve`` in this process, without a socket.

For libraries that speak OpenAI's API and let their transport be replaced: ``openai``, DSPy.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

#: Only a name: nothing is resolved or connected.
ADDRESS = "http://embedlm.local/v1"
Headers = list[tuple[bytes, bytes]]
_T = TypeVar("_T")


class Request(NamedTuple):
    """An HTTP request, with a whole body."""

    method: str
    url: str
    headers: Iterable[tuple[bytes, bytes]]
    body: bytes


class TimedOut(Exception):
    """A response took too long; its request was ended."""


class LoopThread:
    """An event loop in a thread of its own, which ends with :meth:`close`, or when nothing refers
    to this object. What runs on it then is cancelled first."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_run, args=(self._loop,), name="sdk-in-process", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, _stop, self._loop).atexit = False

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of ``work``; an exception that is raised here (Ctrl-C) cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if self._thread.is_alive():
            _stop(self._loop)
            self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.wait(left))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


class Exchange:
    """One request to an ASGI application, and its response. Used on one event loop, but for
    :meth:`leave`.

    ``timeout``: the longest wait for the head of the response, and for each piece of its body, in
    seconds. :meth:`start` and :meth:`pieces` raise :class:`TimedOut` after it.
    """

    def __init__(self, app: Any, request: Request, timeout: float | None = None) -> None:
        self._timeout = timeout
        url = urlsplit(request.url)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": url.scheme,
            "path": unquote(url.path),
            "raw_path": url.path.encode(),
            "root_path": "",
            "query_string": url.query.encode(),
            "headers": [(name.lower(), value) for name, value in request.headers],
            "server": (url.hostname, url.port),
            "client": ("127.0.0.1", 0),
        }
        self._run = app(scope, self._receive, self._send)
        self._unread: dict[str, Any] | None
        self._unread = {"type": "http.request", "body": request.body, "more_body": False}

    async def start(self) -> tuple[int, Headers]:
        """Status and headers of the response. An error of the application is raised."""
        self._started: asyncio.Future[tuple[int, Headers]]
        self._started = asyncio.get_running_loop().create_future()
        # Not bounded: all of it is the text of an answer.
        self._pieces = asyncio.Queue[bytes | None]()
        self._left = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._run)
        self._task.add_done_callback(lambda _: self._pieces.put_nowait(None))
        try:
            done, _ = await asyncio.wait(
                [self._started, self._task],
                return_when=asyncio.FIRST_COMPLETED,
                timeout=self._timeout,
            )
            if not done:
                raise self._timed_out()
            if not self._started.done():
                await self._task  # its error
            return self._started.result()
        except BaseException:
            await self.close()
            raise

    async def _receive(self) -> dict[str, Any]:
        message, self._unread = self._unread, None
        if message is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        return message

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._started.set_result((message["status"], list(message.get("headers", ()))))
        elif message["type"] == "http.response.body" and message.get("body"):
            self._pieces.put_nowait(message["body"])

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while (piece := await self._piece()) is not None:
            yield piece
        if not self._left.is_set():
            await self._task  # its error

    async def _piece(self) -> bytes | None:
        try:
            return await asyncio.wait_for(self._pieces.get(), self._timeout)
        except asyncio.TimeoutError:
            await self.close()
            raise self._timed_out() from None

    def _timed_out(self) -> TimedOut:
        return TimedOut(f"no answer, or no more of it, within {self._timeout:g} s")

    def leave(self) -> None:
        """The reader has left, for any thread: the request ends soon."""
        with suppress(RuntimeError):  # its event loop is closed, and has ended it
            self._loop.call_soon_threadsafe(self._task.cancel)

    def close_from(self, thread: LoopThread) -> None:
        """:meth:`close` on the event loop of ``thread``, for any other one. If that has ended,
        nothing is left to do."""
        if not self._task.done():
            thread.run(self.close())

    async def close(self) -> None:
        """The reader has left: the request ends. Idempotent."""
        self._left.set()
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
