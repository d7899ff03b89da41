"""The ``openai`` package's own clients on an :class:`sdk.LLM` in this process, without a socket.

Frameworks that take an OpenAI client, such as pydantic-ai, LlamaIndex or instructor, work with it
unchanged: requests go through the application of ``embedlm serve`` (``sdk.serving``) in this
process, and streams arrive piece by piece. ``pip install openai`` and the extra ``server``.

A client's HTTP library is httpx or httpx2, depending on openai's release: its classes are looked up
where the client has them.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from types import ModuleType
from typing import Any, TypeVar

import openai

from sdk.serving import create_app

#: Only a name: nothing is resolved or connected.
_ADDRESS = "http://embedlm.local/v1"
_T = TypeVar("_T")


def async_client(models: Any, **options: Any) -> openai.AsyncOpenAI:
    """An ``openai.AsyncOpenAI``. ``models``: an ``LLM``, or a mapping of names to several.

    ``options``: those of ``openai.AsyncOpenAI``, such as ``timeout``. Its owner closes the ``LLM``.
    """
    library = _library(openai.DefaultAsyncHttpxClient)

    class Transport(library.AsyncBaseTransport):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self._app = create_app(models)

        async def handle_async_request(self, request: Any) -> Any:
            exchange = _Exchange(self._app, request, await request.aread())
            status, headers = await exchange.start()

            class Body(library.AsyncByteStream):  # type: ignore[name-defined]
                async def __aiter__(self) -> AsyncIterator[bytes]:
                    async for piece in exchange.pieces():
                        yield piece

                async def aclose(self) -> None:
                    await exchange.close()

            return library.Response(status, headers=headers, stream=Body())

    client = openai.DefaultAsyncHttpxClient(transport=Transport())
    return openai.AsyncOpenAI(**{**_DEFAULTS, **options, "http_client": client})


def client(models: Any, **options: Any) -> openai.OpenAI:
    """An ``openai.OpenAI``, like :func:`async_client`. It has a thread with an event loop, which
    ``close()`` ends."""
    library = _library(openai.DefaultHttpxClient)

    class Transport(library.BaseTransport):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self._app = create_app(models)
            self._loop = _LoopThread()

        def handle_request(self, request: Any) -> Any:
            exchange, loop = _Exchange(self._app, request, request.read()), self._loop
            status, headers = loop.run(exchange.start())

            class Body(library.SyncByteStream):  # type: ignore[name-defined]
                def __iter__(self) -> Iterator[bytes]:
                    pieces = exchange.pieces()
                    while (piece := loop.run(anext(pieces, None))) is not None:
                        yield piece

                def close(self) -> None:
                    loop.run(exchange.close())

            return library.Response(status, headers=headers, stream=Body())

        def close(self) -> None:
            self._loop.close()

    made = openai.DefaultHttpxClient(transport=Transport())
    return openai.OpenAI(**{**_DEFAULTS, **options, "http_client": made})


_DEFAULTS: Mapping[str, Any] = {"base_url": _ADDRESS, "api_key": "none", "max_retries": 0}


def _library(client: type) -> ModuleType:
    """The HTTP library from which openai derives its clients."""
    bases = [one.__module__.partition(".")[0] for one in client.__mro__]
    return sys.modules[next(name for name in bases if name not in ("openai", "builtins"))]


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="sdk-openai", daemon=True
        )
        self._thread.start()

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
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Exchange:
    """One request to an ASGI application, and its response. Made and used on one event loop."""

    def __init__(self, app: Any, request: Any, body: bytes) -> None:
        url = request.url
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": url.scheme,
            "path": url.path,
            "raw_path": url.raw_path.partition(b"?")[0],
            "root_path": "",
            "query_string": url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "server": (url.host, url.port),
            "client": ("127.0.0.1", 0),
        }
        self._run = app(scope, self._receive, self._send)
        self._unread: dict[str, Any] | None
        self._unread = {"type": "http.request", "body": body, "more_body": False}

    async def start(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers of the response. An error of the application is raised."""
        self._started: asyncio.Future[tuple[int, list[tuple[bytes, bytes]]]]
        self._started = asyncio.get_running_loop().create_future()
        # Not bounded: all of it is the text of an answer.
        self._pieces = asyncio.Queue[bytes | None]()
        self._left = asyncio.Event()
        self._task = asyncio.ensure_future(self._run)
        self._task.add_done_callback(lambda _: self._pieces.put_nowait(None))
        try:
            await asyncio.wait([self._started, self._task], return_when=asyncio.FIRST_COMPLETED)
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
        while (piece := await self._pieces.get()) is not None:
            yield piece
        if not self._left.is_set():
            await self._task  # its error

    async def close(self) -> None:
        """The reader has left: the request ends. Idempotent."""
        self._left.set()
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
