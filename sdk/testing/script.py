"""What a fake LLM answers: texts, failures, and the tokens that a request gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sdk.api.errors import EngineDeadError, RequestError
from sdk.api.lora import LoRARequest
from sdk.api.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.kinds import Message
from sdk.sampling.resolved import ResolvedParams

#: What was asked: a text, or the messages of a conversation.
Asked = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class FakeAnswer:
    """One scripted answer.

    ``tool_calls``: pairs of a function's name and its arguments, written after the text as Hermes
    models do. ``finish_reason="length"`` ends it as if ``max_tokens`` were reached. ``error`` ends
    it after its text: an :class:`EngineDeadError` stops the engine, any other exception only this
    request, whose ``finish_reason`` is then ``"error"`` and whose ``stop_reason`` is the message.
    """

    text: str = ""
    tool_calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    finish_reason: Literal["stop", "length"] = "stop"
    error: Exception | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise RequestError(f"FakeAnswer: text: expected a string, found {safe_repr(self.text)}")
        if self.finish_reason not in ("stop", "length"):
            raise RequestError(
                "FakeAnswer: finish_reason: expected 'stop' or 'length', found "
                f"{safe_repr(self.finish_reason)}; use error= for a failure and llm.abort() for an "
                "abort"
            )
        if self.finish_reason == "length" and (self.error is not None or not self.written):
            raise RequestError(
                "FakeAnswer: finish_reason 'length' needs a text, and no error; leave one out"
            )

    @property
    def written(self) -> str:
        """The text with the tool calls."""
        calls = [{"name": name, "arguments": dict(given)} for name, given in self.tool_calls]
        return self.text + "".join(
            f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls
        )


Answer = str | FakeAnswer | Exception
Answers = Answer | Sequence[Answer] | Mapping[str, Answer] | Callable[[Any], Answer]


@dataclass(frozen=True, slots=True)
class FakeRequest:
    """A request that a fake LLM accepted: the text or the messages, and the parameters."""

    prompt: Any
    sampling_params: SamplingParams
    kind: Literal["generate", "embed"] = "generate"
    lora_request: LoRARequest | None = None


@dataclass(frozen=True, slots=True)
class ScriptedParams(ResolvedParams):
    """Carries the answers of a request to the executor: tokens, and how each ends."""

    answers: tuple[tuple[tuple[int, ...], Exception | None], ...] = field(
        default=(), compare=False, repr=False
    )


class Script:
    """Chooses the answer of each request; see :class:`sdk.testing.FakeLLM`."""

    def __init__(self, answers: Answers, errors: Mapping[int, Exception] | None) -> None:
        known = (str, FakeAnswer, Exception, Mapping, Sequence)
        if not isinstance(answers, known) and not callable(answers):
            raise RequestError(
                "answers: expected a text, a list, a dict or a function, found "
                f"{safe_repr(answers)}"
            )
        for number, error in (errors or {}).items():
            if not isinstance(number, int) or not isinstance(error, Exception):
                raise RequestError(
                    "errors: expected exceptions by the number of the request (0 is the first), "
                    f"found {safe_repr({number: error})}"
                )
        self._answers = answers
        self._errors = dict(errors or {})
        self._count = 0
        self._lock = threading.Lock()

    def next(self, asked: Asked) -> FakeAnswer:
        """The answer to ``asked``. Raises the exception that the script has instead.

        :raises AssertionError: the script has no answer.
        """
        with self._lock:
            number, self._count = self._count, self._count + 1
        error = self._errors.get(number)
        found = self._find(asked, number) if error is None else error
        if isinstance(found, FakeAnswer):
            return found
        if isinstance(found, str):
            return FakeAnswer(found)
        if isinstance(found, EngineDeadError):
            return FakeAnswer(error=found)
        if isinstance(found, Exception):
            raise found
        raise AssertionError(
            "FakeLLM: answers: expected a text, a FakeAnswer or an exception for request "
            f"{number + 1}, found {safe_repr(found)}"
        )

    def _find(self, asked: Asked, number: int) -> Any:
        answers = self._answers
        if isinstance(answers, str | FakeAnswer | Exception):
            return answers
        if isinstance(answers, Mapping):
            text: Any = asked if isinstance(asked, str) else asked[-1].get("content")
            try:
                return answers[text]  # not get(): a defaultdict has an answer to everything
            except KeyError:
                raise AssertionError(
                    f"FakeLLM: answers: no answer to {safe_repr(text)}; known prompts: "
                    f"{safe_repr(list(answers))}"
                ) from None
        if isinstance(answers, Sequence):
            if number >= len(answers):
                raise AssertionError(
                    f"FakeLLM: answers: {len(answers)} were given, and this is request "
                    f"{number + 1}: {safe_repr(asked)}; give more answers, or a function"
                )
            return answers[number]
        return answers(asked)
