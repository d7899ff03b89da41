"""The ``openai`` package's own clients on an :class:`sdk.LLM` in this process, without a socket.

Frameworks that take an OpenAI client, such as pydantic-ai, LlamaIndex or instructor, work with it
unchanged: requests go through the application of ``embedlm serve`` (``sdk.serving``) in this
process, and streams arrive piece by piece. ``pip install openai`` and the extra ``server``.

A client's HTTP library is httpx or httpx2, depending on openai's release: its classes are looked up
where the client has them.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from types import ModuleType
from typing import Any

from sdk.integrations.in_process import ADDRESS, Exchange, LoopThread, Request
from sdk.kernels.packages import needed_for
from sdk.serving import create_app

with needed_for("sdk.integrations.openai needs"):
    import openai


def async_client(models: Any, **options: Any) -> openai.AsyncOpenAI:
    """An ``openai.AsyncOpenAI``. ``models``: an ``LLM``, or a mapping of names to several.

    ``options``: those of ``openai.AsyncOpenAI``, such as ``timeout``. Its owner closes the ``LLM``.
    """
    library = _library(openai.DefaultAsyncHttpxClient)

    class Transport(library.AsyncBaseTransport):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self._app = create_app(models)

        async def handle_async_request(self, request: Any) -> Any:
            exchange = Exchange(self._app, _plain(request, await request.aread()))
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
            self._loop = LoopThread()

        def handle_request(self, request: Any) -> Any:
            exchange, loop = Exchange(self._app, _plain(request, request.read())), self._loop
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


_DEFAULTS: Mapping[str, Any] = {"base_url": ADDRESS, "api_key": "none", "max_retries": 0}


def _plain(request: Any, body: bytes) -> Request:
    return Request(request.method, str(request.url), request.headers.raw, body)


def _library(client: type) -> ModuleType:
    """The HTTP library from which openai derives its clients."""
    bases = [one.__module__.partition(".")[0] for one in client.__mro__]
    return sys.modules[next(name for name in bases if name not in ("openai", "builtins"))]
