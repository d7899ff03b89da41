"""``OpenAI(llm)`` and ``AsyncOpenAI(llm)``: the methods of the ``openai`` package, in this process.

There is no socket, no server and no dependency. Programs that were written for OpenAI's client can
run on an :class:`sdk.LLM`, or in their tests on a :class:`sdk.testing.FakeLLM`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from sdk.api.outputs import EmbeddingOutput, RequestOutput
from sdk.api.params import SamplingParams
from sdk.compat.openai_errors import (
    APIConnectionError as APIConnectionError,
    APIError as APIError,
    APIStatusError as APIStatusError,
    APITimeoutError as APITimeoutError,
    BadRequestError as BadRequestError,
    InternalServerError as InternalServerError,
    OpenAIError as OpenAIError,
    openai_errors,
)
from sdk.compat.openai_requests import (
    CHAT_ARGUMENTS,
    COMPLETION_ARGUMENTS,
    check_ended,
    request_of,
    shows,
)
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.reader import with_salt
from sdk.serving.openai.completions import CompletionResponses
from sdk.serving.openai.objects import CreateEmbeddingResponse
from sdk.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    read_chat,
    read_completion,
)
from sdk.serving.openai.responses import Responses
from sdk.tokenizer import LLMTokenizer

T = TypeVar("T")


class LanguageModel(Protocol):
    """The methods of :class:`sdk.LLM` that the clients call."""

    def get_default_sampling_params(self) -> SamplingParams: ...
    def generate(self, prompts: Any, sampling_params: Any = None, **more: Any) -> Any: ...
    def chat(self, messages: Any, sampling_params: Any = None, **more: Any) -> Any: ...
    def stream(self, prompt: Any, sampling_params: Any = None, **more: Any) -> Any: ...
    async def agenerate(self, prompts: Any, sampling_params: Any = None) -> Any: ...
    async def achat(self, messages: Any, sampling_params: Any = None, **more: Any) -> Any: ...
    def astream(self, prompt: Any, sampling_params: Any = None, **more: Any) -> Any: ...
    def embed(self, prompts: Any, **more: Any) -> list[EmbeddingOutput]: ...
    def get_tokenizer(self) -> LLMTokenizer: ...


class Stream(Generic[T]):
    """The chunks of one answer. Closing it aborts the request."""

    def __init__(
        self,
        pieces: Generator[RequestOutput, None, None],
        chunk: Callable[[RequestOutput], T],
        last: Callable[[RequestOutput], T] | None,
    ) -> None:
        self._pieces = pieces
        self._chunks = self._read(chunk, last)

    def _read(
        self, chunk: Callable[[RequestOutput], T], last: Callable[[RequestOutput], T] | None
    ) -> Iterator[T]:
        with openai_errors():
            for piece in self._pieces:
                yield chunk(piece)
                if piece.finished and last is not None:
                    yield last(piece)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return next(self._chunks)

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._pieces.close()


class AsyncStream(Generic[T]):
    """:class:`Stream` for an event loop."""

    def __init__(
        self,
        pieces: Any,
        chunk: Callable[[RequestOutput], T],
        last: Callable[[RequestOutput], T] | None,
    ) -> None:
        self._pieces = pieces
        self._chunks = self._read(chunk, last)

    async def _read(
        self, chunk: Callable[[RequestOutput], T], last: Callable[[RequestOutput], T] | None
    ) -> AsyncIterator[T]:
        with openai_errors():
            async for piece in self._pieces:
                yield chunk(piece)
                if piece.finished and last is not None:
                    yield last(piece)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        return await self._chunks.__anext__()

    async def __aenter__(self) -> AsyncStream[T]:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort the request unless it has ended."""
        await self._pieces.aclose()


class _Resource:
    def __init__(self, llm: LanguageModel, name: str) -> None:
        self._llm = llm
        self._name = name

    def _responses(
        self, prefix: str, model: str | None, asked: ChatRequest | None = None
    ) -> Responses:
        if asked is None:
            return Responses(prefix, model or self._name, check_ended)
        tokenizer, top = self._llm.get_tokenizer(), asked.params.logprobs
        return Responses(prefix, model or self._name, check_ended, tokenizer, top)

    def _chat(self, messages: Any, given: dict[str, Any]) -> ChatRequest:
        default = self._llm.get_default_sampling_params()
        asked = request_of(read_chat, CHAT_ARGUMENTS, given, default, messages=messages)
        if asked.cache_salt is not None:
            asked.template["cache_salt"] = asked.cache_salt
        return asked

    def _completion(
        self, prompt: Any, model: str | None, given: dict[str, Any], stream: bool
    ) -> tuple[CompletionResponses, list[Any], CompletionRequest]:
        default = self._llm.get_default_sampling_params()
        asked = request_of(read_completion, COMPLETION_ARGUMENTS, given, default, prompt=prompt)
        if stream and len(asked.prompts) > 1:
            raise BadRequestError(
                f"prompt: expected one prompt with stream=True, found {len(asked.prompts)}"
            )
        tokenizer = self._llm.get_tokenizer()
        made = CompletionResponses(model or self._name, check_ended, asked, tokenizer)
        return made, [with_salt(one, asked.cache_salt) for one in asked.prompts], asked

    def _check_embeddings(self, encoding_format: str | None, dimensions: int | None) -> None:
        # openai's marks for arguments that are left out are false
        encoding_format, dimensions = encoding_format or None, dimensions or None
        if encoding_format not in (None, "float"):
            raise BadRequestError(
                f"encoding_format: expected 'float', found {safe_repr(encoding_format)}"
            )
        if dimensions is not None:
            raise BadRequestError("dimensions: is not supported; leave it out")


class ChatCompletions(_Resource):
    """``client.chat.completions``."""

    @shows(*CHAT_ARGUMENTS)
    def create(
        self, *, messages: Any, model: str | None = None, stream: bool = False, **given: Any
    ) -> Any:
        """A ``ChatCompletion``, or with ``stream=True`` a :class:`Stream` of its chunks.

        :raises BadRequestError: an argument is invalid or not supported.
        :raises APITimeoutError: the ``timeout`` has passed.
        """
        with openai_errors():
            asked = self._chat(messages, {**given, "stream": stream})
            made, params = self._responses("chatcmpl", model, asked), asked.params
            if not stream:
                found = self._llm.chat(messages, params, use_tqdm=False, **asked.template)
                return made.chat(found[0])
            pieces = self._llm.stream(messages, params, **asked.template)
            return Stream(pieces, made.chunk, made.last_chunk if asked.streaming.usage else None)


class Completions(_Resource):
    """``client.completions``."""

    @shows(*COMPLETION_ARGUMENTS)
    def create(
        self, *, prompt: Any, model: str | None = None, stream: bool = False, **given: Any
    ) -> Any:
        """A ``Completion``, or with ``stream=True`` a :class:`Stream` of parts of one."""
        with openai_errors():
            given = {**given, "stream": stream}
            made, prompts, asked = self._completion(prompt, model, given, stream)
            if not stream:
                return made.whole(self._llm.generate(prompts, asked.params, use_tqdm=False))
            last = made.last_chunk if asked.streaming.usage else None
            return Stream(self._llm.stream(prompts[0], asked.params), made.chunk, last)


class Embeddings(_Resource):
    """``client.embeddings``."""

    def create(
        self,
        *,
        input: Any,
        model: str | None = None,
        encoding_format: str | None = None,
        dimensions: int | None = None,
    ) -> CreateEmbeddingResponse:
        """An embedding for each text, or list of token ids, of ``input``."""
        with openai_errors():
            self._check_embeddings(encoding_format, dimensions)
            found = self._llm.embed(input, use_tqdm=False)
            return self._responses("embd", model).embeddings(found)


class AsyncChatCompletions(_Resource):
    """``client.chat.completions`` for an event loop."""

    @shows(*CHAT_ARGUMENTS)
    async def create(
        self, *, messages: Any, model: str | None = None, stream: bool = False, **given: Any
    ) -> Any:
        """See :meth:`ChatCompletions.create`."""
        with openai_errors():
            asked = self._chat(messages, {**given, "stream": stream})
            made, params = self._responses("chatcmpl", model, asked), asked.params
            if not stream:
                return made.chat((await self._llm.achat(messages, params, **asked.template))[0])
            pieces = await self._llm.astream(messages, params, **asked.template)
            last = made.last_chunk if asked.streaming.usage else None
            return AsyncStream(pieces, made.chunk, last)


class AsyncCompletions(_Resource):
    """``client.completions`` for an event loop."""

    @shows(*COMPLETION_ARGUMENTS)
    async def create(
        self, *, prompt: Any, model: str | None = None, stream: bool = False, **given: Any
    ) -> Any:
        """See :meth:`Completions.create`."""
        with openai_errors():
            given = {**given, "stream": stream}
            made, prompts, asked = self._completion(prompt, model, given, stream)
            if not stream:
                return made.whole(await self._llm.agenerate(prompts, asked.params))
            last = made.last_chunk if asked.streaming.usage else None
            pieces = await self._llm.astream(prompts[0], asked.params)
            return AsyncStream(pieces, made.chunk, last)


class AsyncEmbeddings(_Resource):
    """``client.embeddings`` for an event loop."""

    async def create(
        self,
        *,
        input: Any,
        model: str | None = None,
        encoding_format: str | None = None,
        dimensions: int | None = None,
    ) -> CreateEmbeddingResponse:
        """See :meth:`Embeddings.create`."""
        with openai_errors():
            self._check_embeddings(encoding_format, dimensions)
            found = await asyncio.to_thread(self._llm.embed, input, use_tqdm=False)
            return self._responses("embd", model).embeddings(found)


class Chat:
    """``client.chat``."""

    def __init__(self, llm: LanguageModel, name: str) -> None:
        self.completions = ChatCompletions(llm, name)


class AsyncChat:
    """``client.chat`` for an event loop."""

    def __init__(self, llm: LanguageModel, name: str) -> None:
        self.completions = AsyncChatCompletions(llm, name)


class OpenAI:
    """A client with the shape of ``openai.OpenAI`` on ``llm``, which its owner closes.

    ``model`` is the name in responses to requests that name none.
    """

    def __init__(self, llm: LanguageModel, *, model: str = "embedlm") -> None:
        self.chat = Chat(llm, model)
        self.completions = Completions(llm, model)
        self.embeddings = Embeddings(llm, model)

    def __enter__(self) -> OpenAI:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open: the LLM belongs to its owner."""


class AsyncOpenAI:
    """A client with the shape of ``openai.AsyncOpenAI`` on ``llm``, which its owner closes."""

    def __init__(self, llm: LanguageModel, *, model: str = "embedlm") -> None:
        self.chat = AsyncChat(llm, model)
        self.completions = AsyncCompletions(llm, model)
        self.embeddings = AsyncEmbeddings(llm, model)

    async def __aenter__(self) -> AsyncOpenAI:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Nothing is open: the LLM belongs to its owner."""
