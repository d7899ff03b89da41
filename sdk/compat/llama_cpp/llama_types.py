"""The types of llama-cpp-python's results and requests, for annotations and ``isinstance``.

The shapes are those of OpenAI's API; a test compares results with them.
"""

from typing import Any, Literal, TypeAlias

from typing_extensions import NotRequired, TypedDict

JsonType: TypeAlias = "int | str | bool | list[Any] | dict[str, Any] | None"


class EmbeddingUsage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    """The vector of a text, or those of its tokens."""

    index: int
    object: str
    embedding: list[float] | list[list[float]]


class CreateEmbeddingResponse(TypedDict):
    """What ``Llama.create_embedding`` returns."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class CompletionLogprobs(TypedDict):
    """Log-probabilities of the tokens of a text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """A text."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionUsage(TypedDict):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CreateCompletionResponse(TypedDict):
    """What ``Llama.create_completion`` returns, and a chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[CompletionUsage]


class ChatCompletionResponseFunctionCall(TypedDict):
    """A call: ``arguments`` is JSON."""

    name: str
    arguments: str


ChatCompletionMessageToolCallFunction = ChatCompletionResponseFunctionCall
ChatCompletionRequestAssistantMessageFunctionCall = ChatCompletionResponseFunctionCall
ChatCompletionStreamResponseDeltaFunctionCall = ChatCompletionResponseFunctionCall
ChatCompletionFunctionCall = ChatCompletionResponseFunctionCall


class ChatCompletionMessageToolCall(TypedDict):
    """A call with its id."""

    id: str
    type: Literal["function"]
    function: ChatCompletionMessageToolCallFunction


ChatCompletionMessageToolCalls: TypeAlias = list[ChatCompletionMessageToolCall]


class ChatCompletionResponseMessage(TypedDict):
    """An answer."""

    content: str | None
    tool_calls: NotRequired[ChatCompletionMessageToolCalls]
    role: Literal["assistant", "function"]
    function_call: NotRequired[ChatCompletionResponseFunctionCall]


class ChatCompletionTopLogprobToken(TypedDict):
    """A token that was probable."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatCompletionLogprobToken(ChatCompletionTopLogprobToken):
    """A token of an answer."""

    top_logprobs: list[ChatCompletionTopLogprobToken]


class ChatCompletionLogprobs(TypedDict):
    """Log-probabilities of the tokens of an answer."""

    content: list[ChatCompletionLogprobToken] | None
    refusal: list[ChatCompletionLogprobToken] | None


class ChatCompletionResponseChoice(TypedDict):
    """An answer and why it ended."""

    index: int
    message: ChatCompletionResponseMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: str | None


class CreateChatCompletionResponse(TypedDict):
    """What ``Llama.create_chat_completion`` returns."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    usage: CompletionUsage


class ChatCompletionMessageToolCallChunkFunction(TypedDict):
    """A piece of a call."""

    name: str | None
    arguments: str


class ChatCompletionMessageToolCallChunk(TypedDict):
    """A piece of a call and which call it belongs to."""

    index: int
    id: NotRequired[str]
    type: Literal["function"]
    function: ChatCompletionMessageToolCallChunkFunction


class ChatCompletionStreamResponseDeltaEmpty(TypedDict):
    """Nothing new."""


class ChatCompletionStreamResponseDelta(TypedDict):
    """What is new in an answer."""

    content: NotRequired[str | None]
    function_call: NotRequired[ChatCompletionStreamResponseDeltaFunctionCall | None]
    tool_calls: NotRequired[list[ChatCompletionMessageToolCallChunk] | None]
    role: NotRequired[Literal["system", "user", "assistant", "tool"] | None]


class ChatCompletionStreamResponseChoice(TypedDict):
    """What is new in an answer, and why it ended."""

    index: int
    delta: ChatCompletionStreamResponseDelta | ChatCompletionStreamResponseDeltaEmpty
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"] | None
    logprobs: NotRequired[ChatCompletionLogprobs | None]


class CreateChatCompletionStreamResponse(TypedDict):
    """A chunk of a stream."""

    id: str
    model: str
    object: Literal["chat.completion.chunk"]
    created: int
    choices: list[ChatCompletionStreamResponseChoice]


class ChatCompletionFunction(TypedDict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: str
    description: NotRequired[str]
    parameters: dict[str, JsonType]


ChatCompletionFunctions = ChatCompletionFunction
ChatCompletionToolFunction = ChatCompletionFunction
ChatCompletionResponseFunction = ChatCompletionFunction
ChatCompletionFunctionParameters: TypeAlias = dict[str, JsonType]


class ChatCompletionFunctionCallOption(TypedDict):
    """The name of a function."""

    name: str


ChatCompletionRequestFunctionCallOption = ChatCompletionFunctionCallOption
ChatCompletionNamedToolChoiceFunction = ChatCompletionFunctionCallOption
ChatCompletionRequestFunctionCall: TypeAlias = (
    Literal["none", "auto"] | ChatCompletionRequestFunctionCallOption
)


class ChatCompletionRequestResponseFormat(TypedDict):
    """``schema``: a JSON schema."""

    type: Literal["text", "json_object"]
    schema: NotRequired[JsonType]


class ChatCompletionRequestMessageContentPartText(TypedDict):
    """A part of a message. Models read text only."""

    type: Literal["text"]
    text: str


ChatCompletionRequestMessageContentPart: TypeAlias = ChatCompletionRequestMessageContentPartText


class ChatCompletionRequestSystemMessage(TypedDict):
    """Instructions."""

    role: Literal["system"]
    content: str | None


class ChatCompletionRequestUserMessage(TypedDict):
    """A question."""

    role: Literal["user"]
    content: str | list[ChatCompletionRequestMessageContentPart] | None


class ChatCompletionRequestAssistantMessage(TypedDict):
    """An earlier answer."""

    role: Literal["assistant"]
    content: NotRequired[str]
    tool_calls: NotRequired[ChatCompletionMessageToolCalls]
    function_call: NotRequired[ChatCompletionRequestAssistantMessageFunctionCall]


class ChatCompletionRequestToolMessage(TypedDict):
    """The result of a call."""

    role: Literal["tool"]
    content: str | None
    tool_call_id: str
    name: NotRequired[str | None]


class ChatCompletionRequestFunctionMessage(TypedDict):
    """The result of a call in the older form."""

    role: Literal["function"]
    content: str | None
    name: str


ChatCompletionRequestMessage: TypeAlias = (
    ChatCompletionRequestSystemMessage
    | ChatCompletionRequestUserMessage
    | ChatCompletionRequestAssistantMessage
    | ChatCompletionRequestToolMessage
    | ChatCompletionRequestFunctionMessage
)


class ChatCompletionTool(TypedDict):
    """A function that the model may call."""

    type: Literal["function"]
    function: ChatCompletionToolFunction


class ChatCompletionNamedToolChoice(TypedDict):
    """The function that the model must call."""

    type: Literal["function"]
    function: ChatCompletionNamedToolChoiceFunction


ChatCompletionToolChoiceOption: TypeAlias = (
    Literal["none", "auto", "required"] | ChatCompletionNamedToolChoice
)
#: Older names.
EmbeddingData = Embedding
CompletionChunk = CreateCompletionResponse
Completion = CreateCompletionResponse
CreateCompletionStreamResponse = CreateCompletionResponse
ChatCompletionMessage = ChatCompletionResponseMessage
ChatCompletionChoice = ChatCompletionResponseChoice
ChatCompletion = CreateChatCompletionResponse
ChatCompletionChunkDeltaEmpty = ChatCompletionStreamResponseDeltaEmpty
ChatCompletionChunkChoice = ChatCompletionStreamResponseChoice
ChatCompletionChunkDelta = ChatCompletionStreamResponseDelta
ChatCompletionChunk = CreateChatCompletionStreamResponse
ChatCompletionStreamResponse = CreateChatCompletionStreamResponse
