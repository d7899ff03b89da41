"""Responses of OpenAI's API, made from our outputs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from sdk.api.outputs import CompletionOutput, EmbeddingOutput, RequestOutput
from sdk.requests.typed_outputs import MessageAnswer
from sdk.serving.openai.objects import (
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
    CompletionUsage,
    CreateEmbeddingResponse,
    Embedding,
    EmbeddingUsage,
    Function,
    PromptTokensDetails,
    TopLogprob,
)
from sdk.serving.openai.token_names import TokenNames
from sdk.tokenizer import LLMTokenizer


def usage_of(outputs: Sequence[RequestOutput]) -> CompletionUsage:
    """The tokens of whole outputs."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answer = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    return CompletionUsage(prompt, answer, prompt + answer, PromptTokensDetails(cached))


def reason_of(answer: CompletionOutput) -> str | None:
    """The finish reason with OpenAI's words: a deadline limits the length of an answer."""
    return "length" if answer.finish_reason == "deadline" else answer.finish_reason


def stream_usage(outputs: Sequence[RequestOutput]) -> CompletionUsage:
    """The tokens of streams until now, from the newest output of each."""
    usage = usage_of([output._replace(outputs=[]) for output in outputs])
    found = [output.metrics for output in outputs if output.metrics is not None]
    usage.completion_tokens = sum(metrics.num_generation_tokens for metrics in found)
    usage.total_tokens += usage.completion_tokens
    return usage


class Responses:
    """Makes the responses to one request: they share ``id``, ``created`` and ``model``.

    ``check`` raises if an answer did not end by itself. Chats need a ``tokenizer`` for the bytes of
    tokens, and ``top``, how many of the best tokens were asked for at each place (-1: all).
    """

    def __init__(
        self,
        prefix: str,
        model: str,
        check: Callable[[CompletionOutput], None],
        tokenizer: LLMTokenizer | None = None,
        top: int | None = None,
    ) -> None:
        self._check = check
        self._names = None if tokenizer is None else TokenNames(tokenizer)
        self._top = top
        self._facts: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._started: set[int] = set()
        self._calls: set[int] = set()  # answers with tool calls

    @property
    def facts(self) -> dict[str, Any]:
        """``id``, ``created`` and ``model``."""
        return dict(self._facts)

    # ---- chats -----------------------------------------------------------------------------------

    def chat(self, output: RequestOutput) -> ChatCompletion:
        choices = [self._choice(answer) for answer in output.outputs]
        return ChatCompletion(choices=choices, usage=usage_of([output]), **self._facts)

    def _choice(self, answer: CompletionOutput) -> Choice:
        self._check(answer)
        message = ChatCompletionMessage(answer.text)
        reason = reason_of(answer) or "stop"
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
        return Choice(answer.index, message, reason, self.logprobs(answer), answer.closed or None)

    def chunk(self, output: RequestOutput) -> ChatCompletionChunk:
        choices = [self._chunk_choice(answer) for answer in output.outputs]
        return ChatCompletionChunk(choices=choices, **self._facts)

    def _chunk_choice(self, answer: CompletionOutput) -> ChunkChoice:
        self._check(answer)
        delta, reason = ChoiceDelta(answer.text), reason_of(answer)
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
        return ChunkChoice(answer.index, delta, ended, self.logprobs(answer), answer.closed or None)

    def last_chunk(self, output: RequestOutput) -> ChatCompletionChunk:
        """The chunk with the usage of a whole stream, from its last output."""
        usage = stream_usage([output])
        return ChatCompletionChunk(choices=[], usage=usage, **self._facts)

    def logprobs(self, answer: CompletionOutput) -> ChoiceLogprobs | None:
        """Those of the tokens of an answer, or of a delta; ``None`` if nobody asked for them."""
        if answer.logprobs is None:
            return None
        assert self._names is not None and self._top is not None
        names, most = self._names, self._top
        content = []
        for token, row in zip(answer.token_ids, answer.logprobs, strict=True):
            # after the best ones a row has the chosen token, whatever its rank
            best = [one for one in row.entries() if most < 0 or (one[1].rank or 0) <= most]
            tops = [
                TopLogprob(names[other], entry.logprob, names.data(other)) for other, entry in best
            ]
            own = row[token]
            content.append(
                ChatCompletionTokenLogprob(names[token], own.logprob, names.data(token), tops)
            )
        return ChoiceLogprobs(content)

    def embeddings(self, outputs: Sequence[EmbeddingOutput]) -> CreateEmbeddingResponse:
        count = sum(len(output.prompt_token_ids) for output in outputs)
        data = [Embedding(output.embedding, index) for index, output in enumerate(outputs)]
        model = self._facts["model"]
        return CreateEmbeddingResponse(data, model, EmbeddingUsage(count, count))
