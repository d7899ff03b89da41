"""Outputs with more than text: values of a type, and messages with tool calls and reasoning.

They are the named tuples of :mod:`sdk.api.outputs` with properties. What a property needs is
computed when it is read, so unread ones cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sdk.api.errors import RequestError
from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.structured.partial_json import partial_value

if TYPE_CHECKING:
    from sdk.tools import AssistantMessage, MessageDelta, MessageParser

T = TypeVar("T")
_UNREAD: Any = object()


class ParsedAnswer(CompletionOutput, Generic[T]):
    """An answer to a call with ``returns=``."""

    _so_far: str
    _load: Callable[[str], T]
    _parsed: Any

    @classmethod
    def of(cls, answer: CompletionOutput, so_far: str, load: Callable[[str], T]) -> ParsedAnswer[T]:
        """``so_far``: the whole text until now. ``load``: the value of a complete text."""
        made = cls(*answer)
        made._so_far, made._load, made._parsed = so_far, load, _UNREAD
        return made

    @property
    def parsed(self) -> T:
        """The value of the type.

        :raises RequestError: the answer is not complete (yet). Other errors are those of the type,
            such as a pydantic validator's.
        """
        if self._parsed is _UNREAD:
            if self.finish_reason != "stop":
                why = f"it ended with {self.finish_reason!r}"
                if self.finish_reason is None:
                    why = "it has not ended; `partial` has the value so far"
                raise RequestError(f"parsed: the answer is not complete: {why}")
            self._parsed = self._load(self._so_far)
        value: T = self._parsed
        return value

    @property
    def partial(self) -> Any:
        """The JSON value so far: objects, arrays and strings grow from output to output.

        Numbers and words appear when they are complete. ``None`` before the value begins.
        """
        return partial_value(self._so_far, ended=self.finish_reason is not None)


class ParsedOutput(RequestOutput, Generic[T]):
    """The output of a call with ``returns=``."""

    if TYPE_CHECKING:

        @property
        def outputs(self) -> list[ParsedAnswer[T]]:  # type: ignore[override]
            """The answers."""

    @property
    def parsed(self) -> T:
        """The value of the first answer: see :attr:`ParsedAnswer.parsed`."""
        return self.outputs[0].parsed


class MessageReader:
    """The messages of one answer, read from its text piece by piece."""

    def __init__(self, parser: MessageParser) -> None:
        self._parser = parser
        self._texts: list[str] = []
        self._deltas: list[MessageDelta] = []
        self._ended = False

    def add(self, text: str, *, ends: bool) -> int:
        """Add a piece; returns its number."""
        self._texts.append(text)
        self._ended = ends
        return len(self._texts) - 1

    def delta(self, number: int) -> MessageDelta:
        """What is new with a piece."""
        while len(self._deltas) <= number:
            at = len(self._deltas)
            found = self._parser.push(self._texts[at])
            if self._ended and at == len(self._texts) - 1:
                rest = self._parser.finish()
                found = type(found)(
                    found.content + rest.content,
                    found.reasoning + rest.reasoning,
                    found.tool_calls + rest.tool_calls,
                )
            self._deltas.append(found)
        return self._deltas[number]

    def message(self) -> AssistantMessage:
        """The message of all pieces so far."""
        if self._texts:
            self.delta(len(self._texts) - 1)
        return self._parser.message


class MessageAnswer(CompletionOutput):
    """An answer to a chat with ``tools=``. ``text`` is what the model wrote, marks included."""

    _reader: MessageReader
    _number: int

    @classmethod
    def of(cls, answer: CompletionOutput, reader: MessageReader, number: int) -> MessageAnswer:
        """``number``: that of its piece in ``reader``."""
        made = cls(*answer)
        made._reader, made._number = reader, number
        return made

    @property
    def message(self) -> AssistantMessage:
        """The text apart from marks, the reasoning, and the tool calls; in a stream, so far."""
        return self._reader.message()

    @property
    def delta(self) -> MessageDelta:
        """What is new in the message since the output before."""
        return self._reader.delta(self._number)


class MessageOutput(RequestOutput):
    """The output of a chat with ``tools=``."""

    if TYPE_CHECKING:

        @property
        def outputs(self) -> list[MessageAnswer]:  # type: ignore[override]
            """The answers."""

    @property
    def message(self) -> AssistantMessage:
        """The message of the first answer."""
        return self.outputs[0].message


def with_answers(
    kind: type[RequestOutput], output: RequestOutput, answers: Sequence[CompletionOutput]
) -> Any:
    """The output as one of ``kind``, with other answers."""
    return kind(*output._replace(outputs=list(answers)))
