"""The ``openai`` package's own clients on an :class:`sdk.LLM` in this process, without a socket.

Frameworks that take an OpenAI client, such as pydantic-ai, LlamaIndex or instructor, work with it
unchanged: requests go through the application of ``embedlm serve`` (``sdk.serving``) in this
process, and streams arrive piece by piece. ``pip install openai`` and the extra ``server``.

A client's HTTP library is httpx or httpx2, depending on openai's release: its classes are looked up
where the client has them.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sdk.integrations.in_process import ADDRESS, Exchange, LoopThread, Request, TimedOut
from sdk.kernels.packages import needed_for
from sdk.serving import create_app

with needed_for("sdk.integrations.openai needs"):
    import openai


def async_client(models: Any, **options: Any) -> openai.AsyncOpenAI:
    """An ``openai.AsyncOpenAI``. ``models``: an ``LLM``, or a mapping of names to several.

    ``options``: those of ``openai.AsyncOpenAI``; without a ``timeout`` in seconds there is none.
    Its owner closes the ``LLM``.
    """
    library = _library(openai.DefaultAsyncHttpxClient)

    class Transport(library.AsyncBaseTransport):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self._app = create_app(models)

        async def handle_async_request(self, request: Any) -> Any:
            body = await request.aread()
            exchange = Exchange(self._app, _plain(request, body), _seconds(request))
            with _timeouts(library, request):
                status, headers = await exchange.start()

            class Body(library.AsyncByteStream):  # type: ignore[name-defined]
                async def __aiter__(self) -> AsyncIterator[bytes]:
                    with _timeouts(library, request):
                        async for piece in exchange.pieces():
                            yield piece

                async def aclose(self) -> None:
                    await exchange.close()

            facts = {_EXCHANGE: exchange}
            return library.Response(status, headers=headers, stream=Body(), extensions=facts)

    client = openai.DefaultAsyncHttpxClient(transport=Transport())
    return _AsyncClient(**{**_DEFAULTS, **options, "http_client": client})


def client(models: Any, **options: Any) -> openai.OpenAI:
    """An ``openai.OpenAI``, like :func:`async_client`. It has a thread with an event loop, which
    ends with ``close()``, or when nothing refers to the client."""
    library = _library(openai.DefaultHttpxClient)

    class Transport(library.BaseTransport):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self._app = create_app(models)
            self._loop = LoopThread()

        def handle_request(self, request: Any) -> Any:
            loop = self._loop
            exchange = Exchange(self._app, _plain(request, request.read()), _seconds(request))
            with _timeouts(library, request):
                status, headers = loop.run(exchange.start())

            class Body(library.SyncByteStream):  # type: ignore[name-defined]
                def __iter__(self) -> Iterator[bytes]:
                    pieces = exchange.pieces()
                    with _timeouts(library, request):
                        while (piece := loop.run(anext(pieces, None))) is not None:
                            yield piece

                def close(self) -> None:
                    exchange.close_from(loop)

            facts = {_EXCHANGE: exchange}
            return library.Response(status, headers=headers, stream=Body(), extensions=facts)

        def close(self) -> None:
            self._loop.close()

    made = openai.DefaultHttpxClient(transport=Transport())
    return _Client(**{**_DEFAULTS, **options, "http_client": made})


#: A timeout is for a network: without one of the caller, an answer takes as long as it takes.
_DEFAULTS: Mapping[str, Any] = {
    "base_url": ADDRESS,
    "api_key": "none",
    "max_retries": 0,
    "timeout": None,
}
_EXCHANGE = "sdk.exchange"


class _Client(openai.OpenAI):
    """Ends the request of a stream that nothing refers to."""

    def request(self, *args: Any, **kwargs: Any) -> Any:
        return _ended_with(super().request(*args, **kwargs))


class _AsyncClient(openai.AsyncOpenAI):
    """:class:`_Client` for an event loop."""

    async def request(self, *args: Any, **kwargs: Any) -> Any:
        return _ended_with(await super().request(*args, **kwargs))


def _ended_with(found: Any) -> Any:
    """``found``; a stream becomes one whose request ends with it.

    A stream of openai and its iterator refer to each other. So one that is left in the middle
    without ``close()``, as LlamaIndex and Haystack leave theirs, would go on until the garbage
    collector runs. Nothing refers to a copy of the stream, and the copy goes at once.
    """
    if isinstance(found, openai.Stream | openai.AsyncStream):
        exchange = found.response.extensions.get(_EXCHANGE)
        if exchange is None:  # of another http_client (with_options)
            return found
        found = copy.copy(found)
        weakref.finalize(found, exchange.leave).atexit = False
    return found


def _plain(request: Any, body: bytes) -> Request:
    return Request(request.method, str(request.url), request.headers.raw, body)


def _seconds(request: Any) -> float | None:
    """How long a caller waits for a response, and for each piece of it."""
    found: float | None = request.extensions.get("timeout", {}).get("read")
    return found


@contextmanager
def _timeouts(library: ModuleType, request: Any) -> Iterator[None]:
    """Timeouts as errors of the client's HTTP library."""
    try:
        yield
    except TimedOut as error:
        raise library.ReadTimeout(str(error), request=request) from error


def _library(client: type) -> ModuleType:
    """The HTTP library from which openai derives its clients."""
    bases = [one.__module__.partition(".")[0] for one in client.__mro__]
    return sys.modules[next(name for name in bases if name not in ("openai", "builtins"))]
