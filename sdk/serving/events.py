"""Server-sent events of streamed answers as bytes.

Most chunks have nothing but a piece of text. They are put together from constant parts and the
text as JSON, which takes 0.5 us; ``Responses.chunk`` with ``json.dumps`` takes 8 us and makes all
others. A test compares the two.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.serving.openai.completions import CompletionResponses
from sdk.serving.openai.objects import Model
from sdk.serving.openai.requests import StreamOptions
from sdk.serving.openai.responses import Responses

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class ChatEvents:
    """The events of one streamed chat. :raises AnswerError: an answer failed."""

    def __init__(self, made: Responses, options: StreamOptions) -> None:
        self._made = made
        self._options = options
        self._begun: set[int] = set()
        facts = {**made.facts, "object": "chat.completion.chunk"}
        head = json.dumps(facts, separators=(",", ":"))[:-1]
        self._head = f'data: {head},"choices":[{{"index":'
        self._tail = '},"finish_reason":null,"logprobs":null}]}\n\n'

    def of(self, number: int, output: RequestOutput) -> bytes:
        """The event of one output; empty if it has nothing new to show."""
        answers = output.outputs
        if len(answers) == 1 and not self._options.every:
            [answer] = answers
            # the first has the role, the last the reason; with tools the type is another
            if (
                type(answer) is CompletionOutput
                and answer.finish_reason is None
                and answer.logprobs is None
                and answer.index in self._begun
            ):
                if not answer.text:
                    return b""
                return (
                    f'{self._head}{answer.index},"delta":{{"content":{quoted(answer.text)}'
                    f"{self._tail}"
                ).encode()
        chunk = self._made.chunk(output)
        # a choice without anything new: its text is held back until it is certain
        chunk.choices = [
            choice
            for choice in chunk.choices
            if choice.finish_reason or choice.logprobs or _has_news(choice.delta)
        ]
        if not chunk.choices:
            return b""
        self._begun.update(choice.index for choice in chunk.choices)
        if self._options.every:
            chunk.usage = self._made.last_chunk(output).usage
        return event(chunk.wire())

    def end(self, outputs: dict[int, RequestOutput]) -> bytes:
        """The last events. ``outputs``: the last one of each prompt."""
        if not self._options.usage:
            return DONE
        [last] = outputs.values()
        return event(self._made.last_chunk(last).wire()) + DONE


def _has_news(delta: Model) -> bool:
    return any(getattr(delta, name) for name in delta.__slots__)  # type: ignore[attr-defined]


class CompletionEvents:
    """The events of one streamed completion. :raises AnswerError: an answer failed."""

    def __init__(self, made: CompletionResponses, options: StreamOptions, n: int) -> None:
        self._made = made
        self._options = options
        self._n = n
        self._begun: set[int] = set()
        facts = {**made.facts, "object": "text_completion"}
        head = json.dumps(facts, separators=(",", ":"))[:-1]
        self._head = f'data: {head},"choices":[{{"index":'
        self._tail = ',"finish_reason":null,"logprobs":null}]}\n\n'

    def of(self, number: int, output: RequestOutput) -> bytes:
        """See :meth:`ChatEvents.of`."""
        answers = output.outputs
        if len(answers) == 1 and not self._options.every:
            [answer] = answers
            index = number * self._n + answer.index
            if answer.finish_reason is None and answer.logprobs is None and index in self._begun:
                if not answer.text:
                    return b""
                text = quoted(answer.text)
                return f'{self._head}{index},"text":{text}{self._tail}'.encode()
        chunk = self._made.chunk(output, number)
        self._begun.update(choice.index for choice in chunk.choices)
        if self._options.every:
            chunk.usage = self._made.last_chunk(output).usage
        return event(chunk.wire())

    def end(self, outputs: dict[int, RequestOutput]) -> bytes:
        """See :meth:`ChatEvents.end`."""
        if not self._options.usage:
            return DONE
        return event(self._made.last_chunk(*outputs.values()).wire()) + DONE
