"""From the arguments of openai's methods to ours, and from our outputs to its responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sdk.compat.openai_errors import APIError, APITimeoutError, BadRequestError, InternalServerError
from sdk.compat.openai_types import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageToolCall,
    ChatCompletionTokenLogprob,
    Choice,
    ChoiceDelta,
    ChoiceDeltaToolCall,
    ChoiceLogprobs,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionUsage,
    CreateEmbeddingResponse,
    Embedding,
    EmbeddingUsage,
    Function,
    PromptTokensDetails,
    TopLogprob,
)
from sdk.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from sdk.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.typed_outputs import MessageAnswer

#: Arguments that have the same name and meaning in ``SamplingParams``.
_SAME = (
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "best_of"),
)
#: Arguments about a request that are valid and change nothing here.
_IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier")
_CHAT = ("max_completion_tokens", "logprobs", "top_logprobs", "response_format", "reasoning_effort")
_ALL = (*_SAME, *_IGNORED, "logit_bias", "timeout", "extra_body", "stream_options")
CHAT_ARGUMENTS = frozenset((*_ALL, *_CHAT))
COMPLETION_ARGUMENTS = frozenset((*_ALL, "echo", "suffix", "logprobs"))


def sampling_params(
    method: str, known: frozenset[str], given: Mapping[str, Any], default: SamplingParams
) -> SamplingParams:
    """The parameters of one request; ``None`` means the default.

    :raises TypeError: an argument is unknown. :raises BadRequestError: one is not supported.
    """
    unknown = sorted(given.keys() - known)
    if unknown:
        raise TypeError(f"{method}() got an unexpected keyword argument {unknown[0]!r}")
    values = {name: value for name, value in given.items() if value is not None}
    changes: dict[str, Any] = {name: values[name] for name in _SAME if name in values}
    if "max_completion_tokens" in values:
        changes["max_tokens"] = values["max_completion_tokens"]
    if isinstance(bias := values.get("logit_bias"), Mapping):  # keys of JSON are strings
        changes["logit_bias"] = {_token_id(token): add for token, add in bias.items()}
    if "timeout" in values:
        changes["deadline"] = values["timeout"]
    for name in ("echo", "suffix", "reasoning_effort"):
        if values.get(name):
            raise BadRequestError(f"{name}: is not supported; leave it out")
    if "response_format" in values:
        changes |= _structure(values["response_format"])
    if values.get("logprobs"):
        if known is COMPLETION_ARGUMENTS:
            raise BadRequestError("logprobs: supported only by chat.completions; leave it out")
        changes["logprobs"] = values.get("top_logprobs", 0)
    elif "top_logprobs" in values:
        raise BadRequestError("top_logprobs: needs logprobs=True")
    extra = values.get("extra_body", {})
    if not isinstance(extra, Mapping):
        raise BadRequestError(f"extra_body: expected a dict, found {safe_repr(extra)}")
    changes |= extra
    try:
        return default.clone(**changes)
    except TypeError as error:
        raise BadRequestError(f"extra_body: {error}") from error


def _token_id(token: object) -> object:
    return int(token) if isinstance(token, str) and token.isdecimal() else token


def _structure(wanted: object) -> dict[str, Any]:
    """``structured_outputs`` for a ``response_format``."""
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if not isinstance(wanted, Mapping) or kind not in ("text", "json_object", "json_schema"):
        raise BadRequestError(
            "response_format: expected a dict with the type 'text', 'json_object' or "
            f"'json_schema', found {safe_repr(wanted)}"
        )
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    named = wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if schema is None:
        raise BadRequestError(
            "response_format: expected {'type': 'json_schema', 'json_schema': {'name': ..., "
            f"'schema': {{...}}}}}}, found {safe_repr(wanted)}"
        )
    return {"structured_outputs": {"json": schema}}


def includes_usage(options: object) -> bool:
    """Whether ``stream_options`` asks for a last chunk with the usage."""
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


def check_ended(answer: CompletionOutput) -> None:
    """:raises APIError: the answer did not end by itself."""
    if answer.finish_reason == "error":
        raise InternalServerError(str(answer.stop_reason))
    if answer.finish_reason == "deadline":
        raise APITimeoutError("the timeout of the request has passed")
    if answer.finish_reason == "abort":
        raise APIError("the request was aborted")


def usage_of(outputs: Sequence[RequestOutput]) -> CompletionUsage:
    """The tokens of whole outputs."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answer = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return CompletionUsage(prompt, answer, prompt + answer, PromptTokensDetails(cached))


class Responses:
    """Makes the responses to one request: they share ``id``, ``created`` and ``model``."""

    def __init__(self, prefix: str, model: str) -> None:
        self._facts: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._started: set[int] = set()
        self._calls: set[int] = set()  # answers with tool calls
        self._num_tokens = 0

    # ---- chats -----------------------------------------------------------------------------------

    def chat(self, output: RequestOutput) -> ChatCompletion:
        choices = [self._choice(answer) for answer in output.outputs]
        return ChatCompletion(choices=choices, usage=usage_of([output]), **self._facts)

    def _choice(self, answer: CompletionOutput) -> Choice:
        check_ended(answer)
        message = ChatCompletionMessage(answer.text)
        reason = str(answer.finish_reason)
        if isinstance(answer, MessageAnswer):
            found = answer.message
            message.content = found.content or None
            message.reasoning_content = found.reasoning or None
            if found.tool_calls:
                reason = "tool_calls"
                message.tool_calls = [
                    ChatCompletionMessageToolCall(call.id, Function(call.name, call.arguments))
                    for call in found.tool_calls
                ]
        return Choice(answer.index, message, reason, _logprobs(answer))

    def chunk(self, output: RequestOutput) -> ChatCompletionChunk:
        choices = [self._chunk_choice(answer) for answer in output.outputs]
        self._num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        return ChatCompletionChunk(choices=choices, **self._facts)

    def _chunk_choice(self, answer: CompletionOutput) -> ChunkChoice:
        check_ended(answer)
        delta, reason = ChoiceDelta(answer.text), answer.finish_reason
        if isinstance(answer, MessageAnswer):
            found = answer.delta
            delta.content = found.content or None
            delta.reasoning_content = found.reasoning or None
            if found.tool_calls:
                self._calls.add(answer.index)
                delta.tool_calls = [
                    ChoiceDeltaToolCall(
                        call.index,
                        call.id,
                        Function(call.name, call.arguments),
                        None if call.id is None else "function",
                    )
                    for call in found.tool_calls
                ]
        if answer.index not in self._started:
            self._started.add(answer.index)
            delta.role = "assistant"
        ended = "tool_calls" if reason and answer.index in self._calls else reason
        return ChunkChoice(answer.index, delta, ended, _logprobs(answer))

    def last_chunk(self, output: RequestOutput) -> ChatCompletionChunk:
        """The chunk with the usage of a whole stream."""
        return ChatCompletionChunk(choices=[], usage=self._stream_usage(output), **self._facts)

    def _stream_usage(self, output: RequestOutput) -> CompletionUsage:
        usage = usage_of([output._replace(outputs=[])])
        usage.completion_tokens = self._num_tokens
        usage.total_tokens += self._num_tokens
        return usage

    # ---- completions and embeddings --------------------------------------------------------------

    def completion(self, outputs: Sequence[RequestOutput]) -> Completion:
        answers = [answer for output in outputs for answer in output.outputs]
        for answer in answers:
            check_ended(answer)
        choices = [
            CompletionChoice(index, answer.text, answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return Completion(choices=choices, usage=usage_of(outputs), **self._facts)

    def completion_chunk(self, output: RequestOutput) -> Completion:
        for answer in output.outputs:
            check_ended(answer)
        self._num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
        choices = [CompletionChoice(a.index, a.text, a.finish_reason) for a in output.outputs]
        return Completion(choices=choices, **self._facts)

    def last_completion_chunk(self, output: RequestOutput) -> Completion:
        return Completion(choices=[], usage=self._stream_usage(output), **self._facts)

    def embeddings(self, outputs: Sequence[EmbeddingOutput]) -> CreateEmbeddingResponse:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        data = [Embedding(output.embedding, index) for index, output in enumerate(outputs)]
        model = self._facts["model"]
        return CreateEmbeddingResponse(data, model, EmbeddingUsage(count, count))


def _logprobs(answer: CompletionOutput) -> ChoiceLogprobs | None:
    if answer.logprobs is None:
        return None
    content = []
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        tops = [
            TopLogprob(one.decoded_token or "", one.logprob, _bytes(one.decoded_token))
            for _, one in entry.entries()
        ]
        own = entry[token_id]
        text = own.decoded_token or ""
        content.append(ChatCompletionTokenLogprob(text, own.logprob, _bytes(text), tops))
    return ChoiceLogprobs(content)


def _bytes(text: str | None) -> list[int] | None:
    return None if text is None else list(text.encode("utf-8"))
