"""Readers of calls written in Python: ``[f(a=1), g(b="x")]``. Nothing is evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.literals import PYTHON, read_literal
from sdk.tools.stream import NotACallError, Reads, TextStream
from sdk.tools.values import dump, parameter_schema, to_schema

_NAME = re.compile(r"[\w.-]")
_MAX_NAME = 64


def read_call_list(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    """``[f(a=1), g(b="x")]`` of known tools."""
    yield from stream.expect("[")
    yield from stream.space()
    yield from read_list_rest(stream, builder)


def read_list_rest(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    """The calls after the bracket."""
    while True:
        yield from read_call(stream, builder)
        yield from stream.space()
        if (yield from stream.accept(",")) is None:
            yield from stream.expect("]")
            return
        yield from stream.space()
        if (yield from stream.accept("]")):
            return


def read_call(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    """``f(a=1)`` of a known tool; also ``f.call(a=1)``, as Llama calls its built-in tools."""
    name = yield from stream.word(_NAME, _MAX_NAME)
    yield from _read_arguments(stream, builder, name)


def _read_arguments(stream: TextStream, builder: MessageBuilder, name: str) -> Reads[None]:
    """A call after its name."""
    yield from stream.space()
    yield from stream.expect("(")
    if name not in builder.tools:
        name = name.removesuffix(".call")
    tool = builder.begin(name, known=True)
    assert tool is not None
    stream.keep()
    builder.arguments("{")
    count = 0
    while True:
        yield from stream.space()
        if (yield from stream.accept(")")):
            break
        key, value = yield from _read_argument(stream, tool, count)
        value = to_schema(value, parameter_schema(tool.parameters, key))
        builder.arguments(f"{', ' if count else ''}{dump(key)}: {dump(value)}")
        stream.keep()
        count += 1
        yield from stream.space()
        if (yield from stream.accept(",")) is None:
            yield from stream.expect(")")
            break
    builder.arguments("}")
    builder.end()
    stream.keep()


def _read_argument(stream: TextStream, tool: Tool, position: int) -> Reads[tuple[str, Any]]:
    """The name and value of an argument; one without a name is that of the schema's order."""
    first = yield from stream.peek()
    if first.isalpha() or first == "_":
        word = yield from stream.word(_NAME, _MAX_NAME)
        yield from stream.space()
        if (yield from stream.accept("=")):
            yield from stream.space()
            return word, (yield from read_literal(stream, PYTHON))
        constants = {"True": True, "False": False, "None": None}
        if word not in constants:
            raise NotACallError(f"expected a literal in the call, found {word!r}")
        value: Any = constants[word]
    else:
        value = yield from read_literal(stream, PYTHON)
    names = list(tool.parameters.get("properties", ()))
    if position >= len(names):
        raise NotACallError(f"{tool.name}() takes {len(names)} arguments, found more")
    return names[position], value


def read_code(stream: TextStream, builder: MessageBuilder, closing: str) -> Reads[None]:
    """A block of code that only calls known tools: ``x = f(a=1)``, ``print(f(a=1))``, ``[f()]``.

    Anything else is code and no call, so the whole block is read before a call begins.
    """
    pieces: list[str] = []
    if (yield from stream.until((closing,), pieces.append)) is None:
        raise NotACallError("the answer ends inside the code")
    code = "".join(pieces)
    calls = list(_calls_in(code, builder))
    stream.kept()
    for name, arguments in calls:
        builder.begin(name, known=True)
        builder.arguments(arguments)
        builder.end()


def _calls_in(code: str, builder: MessageBuilder) -> Iterator[tuple[str, str]]:
    """The names and arguments of the calls that a piece of code is made of."""
    found = MessageBuilder(builder.tools.values(), str)
    stream = TextStream()
    stream.feed(code)
    stream.end()
    next(_read_statements(stream, found), None)  # the text has ended, so the reader never waits
    for call in found.message().tool_calls:
        yield call.name, call.arguments


def _read_statements(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    yield from stream.space()
    while (yield from stream.peek()):
        if (yield from stream.at("[")):
            yield from read_call_list(stream, builder)
        else:
            yield from _read_statement(stream, builder)
        yield from stream.space()
        yield from stream.accept(";")
        yield from stream.space()


def _read_statement(stream: TextStream, builder: MessageBuilder) -> Reads[None]:
    """``f(...)``, ``x = f(...)`` or ``print(f(...))``."""
    name = yield from stream.word(_NAME, _MAX_NAME)
    yield from stream.space()
    if (yield from stream.accept("=")):
        yield from stream.space()
        name = yield from stream.word(_NAME, _MAX_NAME)
    if name == "print" and name not in builder.tools:
        yield from stream.space()
        yield from stream.expect("(")
        yield from stream.space()
        yield from read_call(stream, builder)
        yield from stream.space()
        yield from stream.expect(")")
    else:
        yield from _read_arguments(stream, builder, name)
