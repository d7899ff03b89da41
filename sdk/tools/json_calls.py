"""Readers of calls that are JSON: ``{"name": ..., "arguments": {...}}``, alone or in a list."""

from __future__ import annotations

import json
import re

from sdk.tools.building import MessageBuilder
from sdk.tools.stream import NotACallError, Reads, Sink, TextStream

#: Brackets may be nested at most this deep.
MAX_DEPTH = 64
#: Keys and names are at most this long.
_MAX_WORD = 256
_ARGUMENTS = ("arguments", "parameters")
_PLAIN = re.compile(r'[^"{}\[\]]*')
_PLAIN_STOP = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
_SCALAR = re.compile(r"[^\s,\]}]")
_CLOSING = {"{": "}", "[": "]"}


def read_calls(
    stream: TextStream,
    builder: MessageBuilder,
    *,
    known: bool = False,
    separators: tuple[str, ...] = (),
) -> Reads[None]:
    """One call, a list of calls, or calls with one of ``separators`` between them.

    ``known``: something is a call only if there is a tool of this name.
    """
    if (yield from stream.accept("[")) is None:
        yield from read_call(stream, builder, known=known)
        while separators and (yield from stream.peek()):
            stream.keep()
            yield from stream.space()
            yield from stream.accept(*separators)
            yield from stream.space()
            if not (yield from stream.at("{")):
                raise NotACallError("expected another call")
            yield from read_call(stream, builder, known=known)
        return
    yield from stream.space()
    yield from read_list_rest(stream, builder, known=known)


def read_list_rest(stream: TextStream, builder: MessageBuilder, *, known: bool) -> Reads[None]:
    """A list of calls after its bracket; it may be empty."""
    while (yield from stream.accept("]")) is None:
        yield from read_call(stream, builder, known=known)
        stream.keep()
        yield from stream.space()
        if (yield from stream.accept(",")) is None:
            yield from stream.expect("]")
            return
        yield from stream.space()


def read_call(stream: TextStream, builder: MessageBuilder, *, known: bool = False) -> Reads[None]:
    """``{"name": "f", "arguments": {...}}``, in any order, with ``parameters`` too.

    Also ``{"type": "function", "function": {...}}`` and ``{"function": "f", ...}``.
    """
    held: list[str] = []
    yield from _read_members(stream, builder, held, known=known)
    if not builder.in_call:
        raise NotACallError("the call has no name")
    builder.end()
    stream.keep()


def _read_members(
    stream: TextStream,
    builder: MessageBuilder,
    held: list[str],
    *,
    known: bool,
    inner: bool = False,
) -> Reads[None]:
    """The members of an object. Arguments that come before the name are collected in ``held``."""
    yield from stream.expect("{")
    written = False
    while True:
        yield from stream.space()
        if (yield from stream.accept("}")):
            break
        key = yield from _read_short_string(stream)
        yield from stream.space()
        yield from stream.expect(":")
        yield from stream.space()
        first = yield from stream.peek()
        if key in ("name", "function") and first == '"' and not builder.in_call:
            builder.begin((yield from _read_short_string(stream)), known=known)
            stream.kept()
            for text in held:
                builder.arguments(text)
                written = True
        elif key == "function" and first == "{" and not builder.in_call and not inner:
            yield from _read_members(stream, builder, held, known=known, inner=True)
            written = builder.in_call
        elif key in _ARGUMENTS and not written and not held:
            yield from _read_arguments(
                stream, builder.arguments if builder.in_call else held.append
            )
            written = builder.in_call
        else:
            yield from read_value(stream, _ignore)
        yield from stream.space()
        if (yield from stream.accept(",")) is None:
            yield from stream.expect("}")
            break
    if builder.in_call and not written:
        builder.arguments("{}")


def _read_arguments(stream: TextStream, sink: Sink) -> Reads[None]:
    """An object; models also write it as a string of JSON, or ``null`` for no arguments."""
    if (yield from stream.peek()) == '"':
        pieces: list[str] = []
        try:
            yield from read_value(stream, pieces.append)
            text = json.loads("".join(pieces))
        except (NotACallError, ValueError) as error:
            sink("".join(pieces))
            raise NotACallError(f"the arguments are not JSON: {error}") from error
        sink(text)
    elif (yield from stream.accept("null")):
        sink("{}")
    else:
        yield from read_value(stream, sink)


def read_value(stream: TextStream, sink: Sink) -> Reads[None]:
    """Pass one JSON value on, as written.

    Models write line breaks and tabs in strings: these are escaped, as JSON demands. Otherwise only
    the quotes and brackets are checked.
    """
    first = yield from stream.peek()
    if first not in '{["' or not first:
        word: list[str] = []
        while (yield from stream.peek()) and _SCALAR.fullmatch((yield from stream.peek())):
            word.append((yield from stream.take()))
        if not word:
            raise NotACallError("expected a JSON value in the call")
        sink("".join(word))
        return
    open_brackets: list[str] = []
    while True:
        yield from stream.run(_PLAIN, sink, _PLAIN_STOP)
        character = yield from stream.take()
        if character == '"':
            sink(character)
            yield from _read_string_rest(stream, sink)
        elif character in _CLOSING:
            sink(character)
            open_brackets.append(_CLOSING[character])
            if len(open_brackets) > MAX_DEPTH:
                raise NotACallError(f"the arguments are nested more than {MAX_DEPTH} deep")
        else:
            if not open_brackets or open_brackets.pop() != character:
                sink(character)
                raise NotACallError(f"the arguments are not JSON: unexpected {character!r}")
            sink(character)
        if not open_brackets:
            return


def _read_string_rest(stream: TextStream, sink: Sink) -> Reads[None]:
    """A string after its opening quote."""
    while True:
        yield from stream.run(_IN_STRING, sink, _STRING_STOP)
        character = yield from stream.take()
        if character == '"':
            sink(character)
            return
        if character == "\\":
            sink(character + (yield from stream.take()))
        else:
            sink(json.dumps(character)[1:-1])


def _read_short_string(stream: TextStream) -> Reads[str]:
    yield from stream.expect('"')
    text = ""
    while (character := (yield from stream.take())) != '"':
        text += character
        if character == "\\":
            text += yield from stream.take()
        if len(text) > _MAX_WORD:
            raise NotACallError(f"a name in the call is longer than {_MAX_WORD} characters")
    try:
        decoded: str = json.loads(f'"{text}"')
    except ValueError as error:
        raise NotACallError(f"a name in the call is not JSON: {error}") from error
    return decoded


def _ignore(text: str) -> None:
    """A value that a call does not need."""
