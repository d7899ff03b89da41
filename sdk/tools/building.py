"""Collects what readers find: the message so far, and what is new in it.

Whitespace next to a mark (``<tool_call>``, ``</think>``, ...) belongs to the mark, so it is held
back until the next text. All other characters of a text are kept as they are.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable
from itertools import groupby

from sdk.tools.definitions import Tool
from sdk.tools.messages import (
    AssistantMessage,
    MessageDelta,
    ToolCall,
    ToolCallDelta,
    arguments_of,
)
from sdk.tools.stream import NotACallError

_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,64}")
_ALPHANUMERIC = string.ascii_letters + string.digits
_NOTHING = MessageDelta()


def new_call_id(length: int | None = None) -> str:
    """A random id of a call, like OpenAI's; with ``length`` only letters and digits."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(length))


class TextPart:
    """The content or the reasoning of a message."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.new: list[str] = []  # since the last delta
        self._held: list[str] = []  # whitespace and end marks that may turn out to be the last
        self._after_mark = False
        self._ends = False  # _held has the mark of the end of the turn

    def write(self, text: str) -> None:
        """Add text."""
        if self._after_mark and not (text := text.lstrip()):
            return
        body = text.rstrip()
        if not body:
            if text:
                self._held.append(text)
            return
        self._after_mark = False
        if self._held:
            self._release()
        self._add(body)
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def mark(self) -> None:
        """A mark was here: drop the whitespace after it, and that before it if no text follows."""
        self._after_mark = True
        if not self.pieces:
            self._held.clear()
            self._ends = False

    def end_mark(self, mark: str) -> None:
        """The model ended its turn; if text follows, ``mark`` is part of the text."""
        self._held.append(mark)
        self._ends = True

    def new_section(self) -> None:
        """Text that follows is on a new line."""
        self._held = ["\n"] if self.pieces else []
        self._ends = False
        self._after_mark = True

    def finish(self) -> None:
        """No more text comes."""
        if not self._after_mark and not self._ends:
            self._release()

    def take_new(self) -> str:
        """What was added since the last call."""
        new, self.new = self.new, []
        return new[0] if len(new) == 1 else "".join(new)

    def _release(self) -> None:
        for text in self._held:
            self._add(text)
        self._held.clear()
        self._ends = False

    def _add(self, text: str) -> None:
        self.pieces.append(text)
        self.new.append(text)


class _Call:
    """One call while it is read."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.index, self.id, self.name = index, call_id, name
        self.pieces: list[str] = []
        self.error: str | None = None

    def as_call(self) -> ToolCall:
        return ToolCall(self.id, self.name, "".join(self.pieces), self.index, self.error)


class MessageBuilder:
    """The message so far. ``tools``: by name; ``call_id`` makes the id of a new call."""

    def __init__(self, tools: Iterable[Tool], call_id: Callable[[], str]) -> None:
        self.content = TextPart()
        self.reasoning = TextPart()
        self.tools = {tool.name: tool for tool in tools}
        self._call_id = call_id
        self._calls: list[_Call] = []
        self._open: _Call | None = None
        self._new: list[ToolCallDelta] = []

    @property
    def in_call(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._open is not None

    def begin(self, name: str, *, known: bool) -> Tool | None:
        """Begin a call; the tool, or ``None`` if there is no such tool.

        :raises NotACallError: the name cannot be one, or ``known`` and there is no such tool.
        """
        name = name.removeprefix("functions.") if name not in self.tools else name
        tool = self.tools.get(name)
        if tool is None and (known or _NAME.fullmatch(name) is None):
            raise NotACallError(f"there is no tool {name!r}")
        assert not self.in_call
        self.content.mark()
        self._open = _Call(len(self._calls), self._call_id(), name)
        self._calls.append(self._open)
        self._new.append(ToolCallDelta(self._open.index, self._open.id, name))
        return tool

    def arguments(self, text: str) -> None:
        """Add a piece of the arguments of the call."""
        assert self._open is not None
        if not text:
            return
        self._open.pieces.append(text)
        self._new.append(ToolCallDelta(self._open.index, arguments=text))

    def end(self, error: str | None = None) -> None:
        """End the call. Without ``error`` its tool and its arguments are checked."""
        call = self._open
        assert call is not None
        if error is None:
            error = self._error(call)
        if error is not None:
            call.error = error
            self._new.append(ToolCallDelta(call.index, error=error))
        self._open = None
        self.content.mark()

    def _error(self, call: _Call) -> str | None:
        if call.name not in self.tools:
            names = ", ".join(self.tools) or "none"
            return f"there is no tool {call.name!r}; the tools are: {names}"
        try:
            arguments_of("".join(call.pieces))
        except ValueError as error:
            return str(error)
        return None

    def finish(self) -> None:
        """The answer has ended."""
        self.content.finish()
        self.reasoning.finish()

    def take_delta(self) -> MessageDelta:
        """What is new since the last call."""
        content = self.content.take_new() if self.content.new else ""
        reasoning = self.reasoning.take_new() if self.reasoning.new else ""
        new = self._new
        if not new:
            return MessageDelta(content, reasoning) if content or reasoning else _NOTHING
        self._new = []
        if len(new) == 1:
            return MessageDelta(content, reasoning, (new[0],))
        groups = groupby(new, lambda delta: delta.index)
        return MessageDelta(content, reasoning, tuple(_merged(list(one)) for _, one in groups))

    def message(self) -> AssistantMessage:
        """Everything so far."""
        calls = [call.as_call() for call in self._calls]
        return AssistantMessage(
            "".join(self.content.pieces), "".join(self.reasoning.pieces), tuple(calls)
        )


def _merged(deltas: list[ToolCallDelta]) -> ToolCallDelta:
    """One delta of several of the same call."""
    first, last = deltas[0], deltas[-1]
    arguments = "".join(delta.arguments for delta in deltas)
    return ToolCallDelta(first.index, first.id, first.name, arguments, last.error)
