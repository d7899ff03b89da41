"""Responses with the attributes of the ``openai`` package's, as small dataclasses."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar


class Model:
    """Base of the responses: the methods of pydantic models that callers use."""

    #: The fields that a server writes as ``null``; it leaves out others that are not set.
    NULLABLE: ClassVar[frozenset[str]] = frozenset()

    def wire(self) -> dict[str, Any]:
        """The values as a server writes them."""
        found = {}
        for name in self.__slots__:  # type: ignore[attr-defined]  # of its dataclass
            value = getattr(self, name)
            if value is None and name not in self.NULLABLE:
                continue
            if isinstance(value, Model):
                value = value.wire()
            elif type(value) is list and value and isinstance(value[0], Model):
                value = [item.wire() for item in value]
            found[name] = value
        return found

    def model_dump(self, *, exclude_none: bool = False) -> dict[str, Any]:
        """All values as plain dicts and lists."""
        return {
            one.name: _plain(value, exclude_none)
            for one in fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
            if (value := getattr(self, one.name)) is not None or not exclude_none
        }

    def to_dict(self) -> dict[str, Any]:
        """The values that are set."""
        return self.model_dump(exclude_none=True)

    def model_dump_json(self, *, indent: int | None = None, exclude_none: bool = False) -> str:
        """:meth:`model_dump` as JSON."""
        return json.dumps(self.model_dump(exclude_none=exclude_none), indent=indent)

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Model):
        return value.model_dump(exclude_none=exclude_none)
    if isinstance(value, list):
        return [_plain(item, exclude_none) for item in value]
    assert not is_dataclass(value)
    return value


@dataclass(slots=True)
class PromptTokensDetails(Model):
    cached_tokens: int = 0


@dataclass(slots=True)
class CompletionUsage(Model):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


@dataclass(slots=True)
class Function(Model):
    name: str | None = None
    arguments: str | None = None


@dataclass(slots=True)
class ChatCompletionMessageToolCall(Model):
    id: str
    function: Function
    type: str = "function"


@dataclass(slots=True)
class ChatCompletionMessage(Model):
    NULLABLE: ClassVar[frozenset[str]] = frozenset(("content", "refusal"))

    content: str | None
    role: str = "assistant"
    tool_calls: list[ChatCompletionMessageToolCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


@dataclass(slots=True)
class TopLogprob(Model):
    token: str
    logprob: float
    bytes: list[int] | None = None


@dataclass(slots=True)
class ChatCompletionTokenLogprob(Model):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = field(default_factory=list)


@dataclass(slots=True)
class ChoiceLogprobs(Model):
    content: list[ChatCompletionTokenLogprob] | None = None
    refusal: list[ChatCompletionTokenLogprob] | None = None


@dataclass(slots=True)
class Choice(Model):
    NULLABLE: ClassVar[frozenset[str]] = frozenset(("logprobs",))

    index: int
    message: ChatCompletionMessage
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    #: Not of OpenAI: the structure was completed because ``max_tokens`` was near.
    closed: bool | None = None


@dataclass(slots=True)
class ChatCompletion(Model):
    id: str
    choices: list[Choice]
    created: int
    model: str
    usage: CompletionUsage | None = None
    object: str = "chat.completion"


@dataclass(slots=True)
class ChoiceDeltaToolCall(Model):
    index: int
    id: str | None = None
    function: Function | None = None
    type: str | None = None


@dataclass(slots=True)
class ChoiceDelta(Model):
    content: str | None = None
    role: str | None = None
    tool_calls: list[ChoiceDeltaToolCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None


@dataclass(slots=True)
class ChunkChoice(Model):
    NULLABLE: ClassVar[frozenset[str]] = frozenset(("finish_reason", "logprobs"))

    index: int
    delta: ChoiceDelta
    finish_reason: str | None = None
    logprobs: ChoiceLogprobs | None = None
    closed: bool | None = None


@dataclass(slots=True)
class ChatCompletionChunk(Model):
    id: str
    choices: list[ChunkChoice]
    created: int
    model: str
    usage: CompletionUsage | None = None
    object: str = "chat.completion.chunk"


@dataclass(slots=True)
class Logprobs(Model):
    """Log-probabilities of a completion; the first token of an echoed prompt has none."""

    NULLABLE: ClassVar[frozenset[str]] = frozenset(("top_logprobs",))

    text_offset: list[int] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None


@dataclass(slots=True)
class CompletionChoice(Model):
    NULLABLE: ClassVar[frozenset[str]] = frozenset(("finish_reason", "logprobs"))

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    closed: bool | None = None


@dataclass(slots=True)
class Completion(Model):
    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    usage: CompletionUsage | None = None
    object: str = "text_completion"


@dataclass(slots=True)
class Embedding(Model):
    embedding: list[float] | str  # str: base64 of little-endian float32
    index: int
    object: str = "embedding"


@dataclass(slots=True)
class EmbeddingUsage(Model):
    prompt_tokens: int
    total_tokens: int


@dataclass(slots=True)
class CreateEmbeddingResponse(Model):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"
