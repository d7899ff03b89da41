"""Readers of values written as Python literals or as FunctionGemma's. Nothing is evaluated."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from sdk.tools.json_calls import MAX_DEPTH
from sdk.tools.stream import NotACallError, Reads, TextStream

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]")
_CONSTANTS = {"True": True, "False": False, "None": None}
_CONSTANTS.update({"true": True, "false": False, "null": None})
_INTEGER = re.compile(r"[+-]?\d{1,4000}")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_OF_BASE = re.compile(r"([+-]?)0([xXoObB])([0-9a-fA-F]{1,1000})")
_BASES = {"x": 16, "o": 8, "b": 2}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


class Dialect(NamedTuple):
    """``quotes``: what strings begin and end with. ``escapes``: whether they have backslashes.
    ``bare``: the characters of a word, and whether other words are strings."""

    quotes: tuple[str, ...]
    escapes: bool
    word: re.Pattern[str]
    bare: bool


#: With ``true``, ``false`` and ``null`` too, which models write. Triple quotes are found first.
PYTHON = Dialect(('"""', "'''", '"', "'"), True, re.compile(r"[^\s,:=\[\](){}\"']"), False)


def number_of(word: str) -> int | float | None:
    """The number that a word is, ``None`` if it is none."""
    if _INTEGER.fullmatch(word):
        return int(word)
    if (found := _OF_BASE.fullmatch(word)) is not None:
        try:
            return int(found[1] + found[3], _BASES[found[2].lower()])
        except ValueError:
            return None
    if _NUMBER.fullmatch(word) and math.isfinite(number := float(word)):
        return number
    return None


def literal_of(text: str) -> Any:
    """The value of a text that is one Python literal. :raises NotACallError: it is none."""
    stream = TextStream()
    stream.feed(text)
    stream.end()
    try:
        reading = _read_all(stream)
        while True:
            next(reading)  # the text has ended, so the reader never waits
    except StopIteration as ended:
        return ended.value


def _read_all(stream: TextStream) -> Reads[Any]:
    yield from stream.space()
    value = yield from read_literal(stream, PYTHON)
    yield from stream.space()
    if rest := (yield from stream.peek()):
        raise NotACallError(f"expected one literal, found {rest!r} after it")
    return value


def read_literal(stream: TextStream, dialect: Dialect, depth: int = 0) -> Reads[Any]:
    """A value: a string, a number, a constant, a list or a dict of values.

    :raises NotACallError: it is something else, or nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise NotACallError(f"the arguments are nested more than {MAX_DEPTH} deep")
    first = yield from stream.peek()
    if first in _CLOSING:
        yield from stream.take()
        if first == "{":
            return (yield from _read_dict(stream, dialect, depth))
        return (yield from _read_list(stream, dialect, depth, _CLOSING[first]))
    if dialect.word.fullmatch(first) is None:
        quote = yield from stream.accept(*dialect.quotes)
        if quote is not None:
            text = yield from _read_string(stream, dialect, quote)
            while dialect.escapes:  # Python joins strings that follow one another
                yield from stream.space()
                if (quote := (yield from stream.accept(*dialect.quotes))) is None:
                    break
                text += yield from _read_string(stream, dialect, quote)
            return text
    word = yield from _read_word(stream, dialect)
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    number = number_of(word.replace("_", ""))
    if number is not None:
        return number
    if dialect.bare:
        return word
    raise NotACallError(f"expected a literal in the call, found {word[:40]!r}")


def _read_word(stream: TextStream, dialect: Dialect) -> Reads[str]:
    found: list[str] = []
    while (character := (yield from stream.peek())) and dialect.word.fullmatch(character):
        found.append((yield from stream.take()))
    if not found:
        # Says that the answer ends, or what comes instead of a value.
        raise NotACallError(f"expected a value in the call, found {(yield from stream.take())!r}")
    return "".join(found).strip()


def _read_string(stream: TextStream, dialect: Dialect, quote: str) -> Reads[str]:
    """A string after its first quote."""
    pieces: list[str] = []
    marks = (quote, "\\") if dialect.escapes else (quote,)
    while True:
        mark = yield from stream.until(marks, pieces.append)
        if mark is None:
            raise NotACallError("the answer ends inside the call")
        if mark == quote:
            return "".join(pieces)
        pieces.append((yield from _read_escape(stream)))


def _read_escape(stream: TextStream) -> Reads[str]:
    """The character after a backslash means another one, as in Python and JSON."""
    character = yield from stream.take()
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character in "\\\"'/":
        return character
    if character == "\n":
        return ""
    if character not in _HEX_DIGITS:
        return "\\" + character
    code = yield from _read_code(stream, _HEX_DIGITS[character])
    if 0xD800 <= code < 0xDC00 and (yield from stream.accept("\\u")):
        low = yield from _read_code(stream, 4)
        if 0xDC00 <= low < 0xE000:
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise NotACallError("a string in the call has an escape that is not a character")
    return chr(code)


def _read_code(stream: TextStream, digits: int) -> Reads[int]:
    found = ""
    for _ in range(digits):
        found += yield from stream.take()
        if _HEX.fullmatch(found[-1]) is None:
            raise NotACallError("a string in the call has an incomplete escape")
    return int(found, 16)


def _read_list(stream: TextStream, dialect: Dialect, depth: int, closing: str) -> Reads[list[Any]]:
    items: list[Any] = []
    while True:
        yield from stream.space()
        if (yield from stream.accept(closing)):
            return items
        items.append((yield from read_literal(stream, dialect, depth + 1)))
        yield from stream.space()
        if (yield from stream.accept(",")) is None:
            yield from stream.expect(closing)
            return items


def _read_dict(
    stream: TextStream, dialect: Dialect, depth: int
) -> Reads[dict[str, Any] | list[Any]]:
    """A dict, or the elements of a set."""
    items: dict[str, Any] = {}
    while True:
        yield from stream.space()
        if (yield from stream.accept("}")):
            return items
        key = yield from read_literal(stream, dialect, depth + 1)
        yield from stream.space()
        if not items and not dialect.bare and not (yield from stream.at(":")):
            return (yield from _read_set_rest(stream, dialect, depth, key))
        if not isinstance(key, str | int | float):
            raise NotACallError("expected a string as key in the call")
        yield from stream.expect(":")
        yield from stream.space()
        items[str(key)] = yield from read_literal(stream, dialect, depth + 1)
        yield from stream.space()
        if (yield from stream.accept(",")) is None:
            yield from stream.expect("}")
            return items


def _read_set_rest(
    stream: TextStream, dialect: Dialect, depth: int, first: Any
) -> Reads[list[Any]]:
    """A set after its first element; each value once."""
    if (yield from stream.accept(",")) is None:
        yield from stream.expect("}")
        return [first]
    items = [first, *(yield from _read_list(stream, dialect, depth, "}"))]
    return [one for index, one in enumerate(items) if one not in items[:index]]
