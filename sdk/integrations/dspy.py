"""A language model of DSPy on an :class:`sdk.LLM` in this process.

``pip install dspy`` (3.4 and newer) and the extras ``server`` and ``structured``. DSPy's own
client of OpenAI's API makes the requests; its transport is replaced by the application of
``embedlm serve`` in this process. ``docs/guides/frameworks.md`` shows it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, ClassVar

from sdk import LLM
from sdk.integrations.in_process import ADDRESS, Exchange, LoopThread, Request
from sdk.integrations.vectors import check_llm
from sdk.kernels.packages import needed_for
from sdk.serving import create_app

with needed_for("sdk.integrations.dspy needs"):
    import dspy
    from dspy.lm15 import AsyncOpenAIChatLM, OpenAIChatLM

#: What its modules ask before they use native calls of tools and schemas.
_PARAMETERS = (
    *("temperature", "max_tokens", "max_completion_tokens", "top_p", "stop", "stream", "seed"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("response_format", "tools", "tool_choice", "parallel_tool_calls"),
)


def lm(llm: LLM, model: str = "embedlm", **options: Any) -> dspy.LM:
    """A ``dspy.LM`` whose requests ``llm`` answers. Concurrent ones share the engine's steps.

    ``model``: the name in DSPy's history, cache and usage: give models different ones.
    ``options``: those of ``dspy.LM``, such as ``temperature``, ``max_tokens``, ``cache``. The
    owner of ``llm`` closes it.
    """
    check_llm(llm)
    app = create_app(llm, model_name=model)
    connection: dict[str, Any] = {"api_key": "none", "base_url": ADDRESS, "compat": "vllm"}
    return dspy.LM(
        model,
        engine=_Engine(transport=_Transport(app), **connection),
        async_engine=_AsyncEngine(transport=_AsyncTransport(app), **connection),
        **{"num_retries": 0, **options},  # nothing that fails here would not fail again
    )


class _Engine(OpenAIChatLM):
    supports_function_calling: ClassVar[bool] = True
    supports_response_schema: ClassVar[bool] = True
    supports_reasoning: ClassVar[bool] = False
    supported_params: ClassVar[frozenset[str]] = frozenset(_PARAMETERS)


class _AsyncEngine(AsyncOpenAIChatLM):
    pass


class _Response:
    """A response whose body comes in pieces; of an event loop in another thread."""

    def __init__(self, exchange: Exchange, loop: LoopThread) -> None:
        self._exchange, self._loop = exchange, loop
        self.status, found = loop.run(exchange.start())
        self.reason, self.http_version = "", "HTTP/1.1"
        self.headers = _text(found)

    def header(self, name: str) -> str | None:
        return _header(self.headers, name)

    def __iter__(self) -> Iterator[bytes]:
        pieces = self._exchange.pieces()
        while (piece := self._loop.run(_next(pieces))) is not None:
            yield piece

    def read(self) -> bytes:
        return b"".join(self)

    def iter_lines(self) -> Iterator[bytes]:
        lines = _Lines()
        for piece in self:
            yield from lines.of(piece)
        yield from lines.rest()

    def __enter__(self) -> _Response:
        return self

    def __exit__(self, *error: object) -> None:
        self._exchange.close_from(self._loop)


class _AsyncResponse:
    """The same on the event loop of the caller."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.reason, self.http_version = "", "HTTP/1.1"

    def header(self, name: str) -> str | None:
        return _header(self.headers, name)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._exchange.pieces():
            yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self])

    async def aiter_lines(self) -> AsyncIterator[bytes]:
        lines = _Lines()
        async for piece in self:
            for line in lines.of(piece):
                yield line
        for line in lines.rest():
            yield line

    async def __aenter__(self) -> _AsyncResponse:
        self.status, found = await self._exchange.start()
        self.headers = _text(found)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._exchange.close()


class _Transport:
    def __init__(self, app: Any) -> None:
        self._app, self._loop = app, LoopThread()

    def stream(self, request: Any) -> _Response:
        return _Response(Exchange(self._app, _plain(request)), self._loop)

    def close(self) -> None:
        self._loop.close()


class _AsyncTransport:
    def __init__(self, app: Any) -> None:
        self._app = app

    def stream(self, request: Any) -> _AsyncResponse:
        return _AsyncResponse(Exchange(self._app, _plain(request)))

    async def aclose(self) -> None:
        """There is nothing to close."""


class _Lines:
    """Lines, with their ends, of text that comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, piece: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return [line + b"\n" for line in lines]

    def rest(self) -> list[bytes]:
        return [self._rest] if self._rest else []


def _plain(request: Any) -> Request:
    headers = [(name.encode(), value.encode()) for name, value in request.headers]
    return Request(request.method, request.url, headers, request.body)


def _text(headers: list[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _header(headers: list[tuple[str, str]], name: str) -> str | None:
    return next((value for key, value in headers if key.lower() == name.lower()), None)


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)
