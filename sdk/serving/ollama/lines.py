"""The answers of ``/api/chat`` and ``/api/generate``: JSON objects, one a line in a stream."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.requests.typed_outputs import MessageAnswer
from sdk.serving.errors import check_ended
from sdk.serving.openai.responses import Responses
from sdk.tools.messages import arguments_of


class Lines:
    """The lines of one answer. ``made``: for its log-probabilities."""

    def __init__(self, model: str, made: Responses, *, chat: bool) -> None:
        self._model = model
        self._made = made
        self._chat = chat

    def of(self, number: int, output: RequestOutput) -> bytes:
        """The lines of one output; empty if it has nothing new to show."""
        parts = [self._piece(answer) for answer in output.outputs]
        return b"".join(line({**self._facts(), **part, "done": False}) for part in parts if part)

    def end(self, outputs: dict[int, RequestOutput]) -> bytes:
        """The last line. ``outputs``: the last one of each prompt."""
        [last] = outputs.values()
        return line({**self._facts(), **self._shown("", "", []), **self._summary(last)})

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The whole answer. :raises AnswerError: it failed."""
        [answer] = output.outputs
        check_ended(answer)
        text, thinking, calls = answer.text, "", []
        if isinstance(answer, MessageAnswer):
            found = answer.message
            text, thinking = found.content, found.reasoning
            calls = [_call(call.name, call.arguments) for call in found.tool_calls]
        shown = {**self._shown(text, thinking, calls), **self._logprobs(answer)}
        return {**self._facts(), **shown, **self._summary(output)}

    def loaded(self) -> dict[str, Any]:
        """The answer to nothing: the model is there."""
        ended = {"done": True, "done_reason": "load"}
        return {**self._facts(), **self._shown("", "", []), **ended}

    def _piece(self, answer: CompletionOutput) -> dict[str, Any]:
        check_ended(answer)
        logprobs = self._logprobs(answer)
        if not isinstance(answer, MessageAnswer):
            shown = answer.text or logprobs
            return {**self._shown(answer.text, "", []), **logprobs} if shown else {}
        found = answer.delta
        calls: list[dict[str, Any]] = []
        if answer.finished:  # a call comes whole
            calls = [_call(call.name, call.arguments) for call in answer.message.tool_calls]
        if not (found.content or found.reasoning or calls or logprobs):
            return {}
        return {**self._shown(found.content, found.reasoning, calls), **logprobs}

    def _shown(self, text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {"response": text, **more}
        if calls:
            more["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **more}}

    def _logprobs(self, answer: CompletionOutput) -> dict[str, Any]:
        found = self._made.logprobs(answer)
        return {"logprobs": found.wire()["content"]} if found and found.content else {}

    def _facts(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": time_text()}

    def _summary(self, output: RequestOutput) -> dict[str, Any]:
        cut = any(answer.finish_reason in ("length", "deadline") for answer in output.outputs)
        made: dict[str, Any] = {"done": True, "done_reason": "length" if cut else "stop"}
        times = output.metrics
        if times is not None and times.first_token_ts and times.last_token_ts:
            made |= {
                "total_duration": nanoseconds(times.last_token_ts - times.arrival_time),
                "load_duration": 0,
                "prompt_eval_count": len(output.prompt_token_ids),
                "prompt_eval_duration": nanoseconds(times.first_token_ts - times.arrival_time),
                "eval_count": times.num_generation_tokens,
                "eval_duration": nanoseconds(times.last_token_ts - times.first_token_ts),
            }
        return made


def _call(name: str, arguments: str) -> dict[str, Any]:
    """A tool call; its arguments are an object."""
    try:
        return {"function": {"name": name, "arguments": arguments_of(arguments)}}
    except ValueError:
        return {"function": {"name": name, "arguments": {}}}


def line(value: dict[str, Any]) -> bytes:
    """One line of a stream."""
    return json.dumps(value).encode() + b"\n"


def nanoseconds(seconds: float) -> int:
    """As Ollama counts durations."""
    return int(seconds * 1e9)


def time_text(seconds: float | None = None) -> str:
    """A moment (default: now), as Ollama writes it."""
    moment = datetime.now(timezone.utc)
    if seconds is not None:
        moment = datetime.fromtimestamp(seconds, timezone.utc)
    return moment.isoformat().replace("+00:00", "Z")
