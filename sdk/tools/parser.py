"""Splits an answer into content, reasoning and tool calls, while it arrives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from sdk.api.errors import RequestError
from sdk.tools.building import MessageBuilder, new_call_id
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.messages import AssistantMessage, MessageDelta
from sdk.tools.reasoning import Reasoning, read_reasoning
from sdk.tools.stream import NotACallError, Reads, TextStream

_ANYTHING = re.compile(r"(?s:.*)")
_NOTHING = re.compile(r"(?!)")


class MessageParser:
    """Parses one answer. ``push`` its text as it arrives, then ``finish``.

    :param format: how the model writes calls; ``None`` if that is unknown.
    :param reasoning: how the model marks its reasoning; ``None``: it is part of the content.
    :param tools: the tools that may be called. Without tools there are no calls.
    :param prompt_opens_reasoning: whether the prompt ends with the opening mark of reasoning.
    :param new_id: makes the id of a call; by default random, as the format wants it.

    The deltas add up to :attr:`message`, which depends only on the text and not on how it was
    split. Marks are not part of the message, nor is whitespace next to a mark.

    Text that only looks like a call is content. A call begins as soon as its name is known, so
    nothing can be taken back from there on: if the rest is broken, the call has an ``error``, and
    its arguments are the rest as it was written. Where a mark begins a call (``<tool_call>``), the
    name of an unknown tool makes a call with an error. Where calls have no mark (JSON or Python at
    the beginning of a line), only names of tools make calls.
    """

    def __init__(
        self,
        format: ToolFormat | None,
        reasoning: Reasoning | None = None,
        tools: Iterable[Tool] = (),
        prompt_opens_reasoning: bool = False,
        *,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        length = None if format is None else format.call_id_length
        self._stream = TextStream()
        self._builder = MessageBuilder(tools, new_id or (lambda: new_call_id(length)))
        self._reader = self._read(format, reasoning, prompt_opens_reasoning)
        self._finished = False
        next(self._reader, None)

    def push(self, text: str) -> MessageDelta:
        """Add a piece of the answer; what is certain by now."""
        if self._finished:
            raise RequestError("push: the answer has ended; make a new MessageParser")
        if text and not self._stream.feed(text):
            next(self._reader, None)
        return self._builder.take_delta()

    def finish(self) -> MessageDelta:
        """The answer has ended; the rest of it."""
        if not self._finished:
            self._finished = True
            self._stream.end()
            next(self._reader, None)
            self._builder.finish()
        return self._builder.take_delta()

    @property
    def message(self) -> AssistantMessage:
        """The message so far; all of it after :meth:`finish`."""
        return self._builder.message()

    def _read(
        self, format: ToolFormat | None, reasoning: Reasoning | None, opened: bool
    ) -> Reads[None]:
        stream, builder, content = self._stream, self._builder, self._builder.content
        if reasoning is not None and (opened or format is None or not format.channels):
            yield from read_reasoning(stream, builder, reasoning, opened=opened)
        if format is None:
            yield from stream.run(_ANYTHING, content.write, _NOTHING)
            return
        if not builder.tools and not format.channels:
            format = format._replace(triggers=(), bare="")
        marks = format.triggers + format.turn_ends + (("\n",) if format.bare else ())
        new_line = True
        while True:
            if format.bare and new_line:
                yield from stream.space(content.write)
                first = yield from stream.peek()
                if first and first in format.bare:
                    new_line = yield from self._attempt(format, "")
                    continue
            mark = yield from stream.until(marks, content.write)
            if mark is None:
                return
            new_line = mark == "\n"
            if new_line:
                content.write(mark)
            elif mark in format.turn_ends:
                content.end_mark(mark)
            else:
                new_line = yield from self._attempt(format, mark)

    def _attempt(self, format: ToolFormat, mark: str) -> Reads[bool]:
        """Read calls after a mark. False if there was none: what was read is content.

        The rest of a broken call, up to its closing mark or the end of the line, is part of its
        arguments.
        """
        stream, builder = self._stream, self._builder
        stream.keep(mark)
        try:
            yield from format.read(stream, builder, mark)
        except NotACallError as error:
            text = stream.kept()
            if not builder.in_call:
                builder.content.write(text)
                return False
            builder.arguments(text)
            ends = (format.closing.get(mark, "\n"), *format.turn_ends)
            end = yield from stream.until(ends, builder.arguments)
            builder.end(str(error))
            if end in format.turn_ends:
                builder.content.end_mark(end)
        stream.kept()
        return True
