"""Answers of Anthropic's Messages API: whole, and as the events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.requests.typed_outputs import MessageAnswer
from sdk.serving.errors import check_ended
from sdk.serving.openai.responses import stream_usage
from sdk.tools.messages import arguments_of


class Messages:
    """Makes the message that answers one request. ``stops``: the stop sequences of the request."""

    def __init__(self, model: str, stops: Sequence[str]) -> None:
        self._stops = stops
        self._facts = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def begun(self, output: RequestOutput) -> dict[str, Any]:
        """Before there is anything of the answer."""
        return {
            **self._facts,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input(output), "output_tokens": 0},
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """:raises AnswerError: the answer failed."""
        [answer] = output.outputs
        check_ended(answer)
        return {
            **self._facts,
            "content": _content(answer),
            **self.ended(answer),
            "usage": usage(output),
        }

    def ended(self, answer: CompletionOutput) -> dict[str, Any]:
        """Why an answer ended."""
        calls = isinstance(answer, MessageAnswer) and answer.message.tool_calls
        if answer.finish_reason in ("length", "deadline"):
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if answer.stop_reason in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}


def _content(answer: CompletionOutput) -> list[dict[str, Any]]:
    """The blocks of a whole answer."""
    if not isinstance(answer, MessageAnswer):
        return [{"type": "text", "text": answer.text}] if answer.text else []
    found, blocks = answer.message, list[dict[str, Any]]()
    if found.reasoning:
        blocks.append(_thinking_block(found.reasoning))
    if found.content:
        blocks.append({"type": "text", "text": found.content})
    for call in found.tool_calls:
        try:
            given = arguments_of(call.arguments)
        except ValueError:  # it was cut
            given = {}
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _input(output: RequestOutput) -> dict[str, int]:
    """The tokens of the prompt: those that were computed, and those that were cached."""
    cached = output.num_cached_tokens or 0
    return {
        "input_tokens": len(output.prompt_token_ids) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def usage(output: RequestOutput) -> dict[str, int]:
    """The tokens until now."""
    return {**_input(output), "output_tokens": stream_usage([output]).completion_tokens}


class MessageEvents:
    """The events of one streamed message. One block is open at a time."""

    def __init__(self, made: Messages) -> None:
        self._made = made
        self._begun = False
        self._index = -1
        self._kind: str | int | None = None  # of the open block: a call has its number
        self._last: CompletionOutput | None = None

    def of(self, number: int, output: RequestOutput) -> bytes:
        """The events of one output. :raises AnswerError: the answer failed."""
        parts: list[bytes] = []
        if not self._begun:
            self._begun = True
            parts.append(_event("message_start", message=self._made.begun(output)))
            parts.append(_event("ping"))
        for answer in output.outputs:
            check_ended(answer)
            self._last = answer
            if not isinstance(answer, MessageAnswer):
                parts += self._grow("text", {"text": ""}, "text_delta", answer.text)
                continue
            found = answer.delta
            block = {"thinking": "", "signature": ""}
            parts += self._grow("thinking", block, "thinking_delta", found.reasoning)
            parts += self._grow("text", {"text": ""}, "text_delta", found.content)
            for call in found.tool_calls:
                if self._kind != call.index:
                    call_id, name = call.id or "", call.name or ""
                    opened = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                    parts += self._open(call.index, opened)
                if call.arguments:
                    delta = {"type": "input_json_delta", "partial_json": call.arguments}
                    parts.append(_event("content_block_delta", index=self._index, delta=delta))
        return b"".join(parts)

    def end(self, outputs: dict[int, RequestOutput]) -> bytes:
        """The last events. ``outputs``: the last one of each prompt."""
        [output] = outputs.values()
        assert self._last is not None
        delta = self._made.ended(self._last)
        parts = [*self._close(), _event("message_delta", delta=delta, usage=usage(output))]
        return b"".join([*parts, _event("message_stop")])

    def _grow(self, kind: str, block: dict[str, Any], delta: str, text: str) -> list[bytes]:
        """A piece of text for the open block, or for a new one."""
        if not text:
            return []
        parts = [] if self._kind == kind else self._open(kind, {"type": kind, **block})
        value = {"type": delta, kind: text}
        return [*parts, _event("content_block_delta", index=self._index, delta=value)]

    def _open(self, kind: str | int, block: dict[str, Any]) -> list[bytes]:
        parts = self._close()
        self._kind, self._index = kind, self._index + 1
        return [*parts, _event("content_block_start", index=self._index, content_block=block)]

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        self._kind = None
        return [_event("content_block_stop", index=self._index)]


def _event(kind: str, **values: Any) -> bytes:
    data = json.dumps({"type": kind, **values}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()
