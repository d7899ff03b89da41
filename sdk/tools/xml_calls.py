"""Readers of calls written as ``<function=name><parameter=key>value</parameter></function>``."""

from __future__ import annotations

import json
import re
from typing import Any

from sdk.tools.building import MessageBuilder
from sdk.tools.stream import NotACallError, Reads, TextStream
from sdk.tools.values import dump, from_text, is_only, parameter_schema

_NAME = re.compile(r"[^<>\s]")
_MAX_NAME = 256
_END = "</parameter>"


def read_function(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    """A call, after ``<function=``."""
    name = yield from stream.word(_NAME, _MAX_NAME)
    yield from stream.expect(">")
    tool = builder.begin(name, known=False)
    stream.keep()
    parameters: Any = {} if tool is None else tool.parameters
    builder.arguments("{")
    comma = ""
    while True:
        yield from stream.space()
        if (yield from stream.accept("</function>")):
            break
        yield from stream.expect("<parameter=")
        key = yield from stream.word(_NAME, _MAX_NAME)
        yield from stream.expect(">")
        yield from stream.accept("\r\n", "\n")
        builder.arguments(f"{comma}{dump(key)}: ")
        schema = parameter_schema(parameters, key)
        stream.kept()
        if is_only(schema, "string"):
            yield from _read_string(stream, builder)
        else:
            stream.keep()
            text = yield from _read_text(stream)
            builder.arguments(dump(from_text(text, schema)))
        stream.keep()
        comma = ", "
    builder.arguments("}")
    builder.end()
    stream.keep()


def _read_text(stream: TextStream) -> Reads[str]:
    """A value up to its end mark, without the line break before the mark."""
    pieces: list[str] = []
    if (yield from stream.until((_END,), pieces.append)) is None:
        raise NotACallError("the answer ends inside the call")
    return "".join(pieces).removesuffix("\n")


def _read_string(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    """Like :func:`_read_text`, for a string: its text is passed on as it arrives."""
    held = ""  # a line break that may be the last one

    def sink(text: str) -> None:
        nonlocal held
        text = held + text
        held = "\n" if text.endswith("\n") else ""
        if body := text.removesuffix("\n"):
            builder.arguments(json.dumps(body, ensure_ascii=False)[1:-1])

    builder.arguments('"')
    if (yield from stream.until((_END,), sink)) is None:
        builder.arguments(json.dumps(held)[1:-1])
        raise NotACallError("the answer ends inside the call")
    builder.arguments('"')
