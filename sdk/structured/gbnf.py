"""Reads llama.cpp's notation for grammars (GBNF), as its parser does (src/llama-grammar.cpp).

Rules are trees of the classes below. ``gbnf_lark.py`` writes them in Lark's notation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

#: Code points, as ranges that are sorted, do not overlap, and include their ends.
Ranges: TypeAlias = tuple[tuple[int, int], ...]
#: Every character: surrogates are none.
ANY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
#: As in llama.cpp. It reads a larger upper bound as none; here it holds, up to the second number.
_MOST_LEAST, _MOST_TIMES = 2000, 10_000
#: Brackets inside one another; each one takes some of Python's stack.
_MOST_NESTED = 100

_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{mark: mark for mark in '\\"[]-'}}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
#: llama.cpp has no underscore in names.
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_NUMBER = re.compile(r"[0-9]+")
_TOKEN = re.compile(r"(!?)<(?:\[([0-9]+)\]|([^>\[][^>]*))>")


class Text(NamedTuple):
    """Exactly this text, which may be empty."""

    text: str


class Characters(NamedTuple):
    """One of these characters."""

    ranges: Ranges


class Token(NamedTuple):
    """A control token: its name, or its id. ``negated``: any token but this one."""

    name: str
    negated: bool


class Reference(NamedTuple):
    """What a rule allows."""

    name: str


class Sequence(NamedTuple):
    """One after the other."""

    parts: tuple[Node, ...]


class Choice(NamedTuple):
    """One of several."""

    options: tuple[Node, ...]


class Repeat(NamedTuple):
    """``least`` to ``most`` times; ``None``: any number of times."""

    part: Node
    least: int
    most: int | None


Node: TypeAlias = Text | Characters | Token | Reference | Sequence | Choice | Repeat


def is_gbnf(text: str) -> bool:
    """Whether a grammar has rules as GBNF writes them."""
    return "::=" in text


def rules_of(text: str) -> dict[str, Node]:
    """The rules by name; of two with one name, the second.

    :raises RequestError: llama.cpp would not read it, or a part cannot be honoured.
    """
    found = _Reader(text).rules()
    if "root" not in found:
        raise _error("expected a rule 'root'")
    return found


def united(sets: Iterable[Ranges]) -> Ranges:
    """The characters of any of several sets."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(one for ranges in sets for one in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def overlap(one: Ranges, other: Ranges) -> bool:
    """Whether two sets have a character in common."""
    first = second = 0
    while first < len(one) and second < len(other):
        if one[first][1] < other[second][0]:
            first += 1
        elif other[second][1] < one[first][0]:
            second += 1
        else:
            return True
    return False


def _without(ranges: Ranges) -> Ranges:
    """All other characters."""
    found: list[tuple[int, int]] = []
    for low, high in ANY:
        for start, end in ranges:
            if end < low or start > high:
                continue
            if start > low:
                found.append((low, start - 1))
            low = end + 1
        if low <= high:
            found.append((low, high))
    return tuple(found)


def _error(message: str) -> RequestError:
    return RequestError(f"grammar: it cannot be read as GBNF: {message}")


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = self._match(_NAME, "the name of a rule")[0]
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_SPACE_AND_LINES)
            found[name] = self._choice(nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._unexpected("a line break")
            self._skip(_SPACE_AND_LINES)
        return found

    def _choice(self, nested: bool) -> Node:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise _error(f"brackets are nested more than {_MOST_NESTED} deep")
        options = [self._sequence(nested)]
        while self._accept("|"):
            self._skip(_SPACE_AND_LINES)
            options.append(self._sequence(nested))
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, nested: bool) -> Node:
        space = _SPACE_AND_LINES if nested else _SPACE
        parts: list[Node] = []
        repeated = 0  # operators may follow one another; each takes some stack
        while True:
            times = self._times(space)
            if times is not None:
                repeated += 1
                if not parts:
                    raise _error(f"nothing comes before a repetition{self._place()}")
                if repeated > _MOST_NESTED:
                    raise _error(f"more than {_MOST_NESTED} repetitions of one part")
                parts[-1] = Repeat(parts[-1], *times)
            else:
                part = self._part()
                if part is None:
                    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))
                repeated = 0
                parts.append(part)
            self._skip(space)

    def _part(self) -> Node | None:
        """What can be repeated, if there is one."""
        if self._accept('"'):
            return self._quoted()
        if self._accept("["):
            return self._class()
        if self._accept("."):
            return Characters(ANY)
        if self._accept("("):
            self._skip(_SPACE_AND_LINES)
            inner = self._choice(nested=True)
            self._expect(")")
            return inner
        if (found := _TOKEN.match(self._text, self._at)) is not None:
            self._at = found.end()
            return self._token(found)
        if (found := _NAME.match(self._text, self._at)) is not None:
            self._at = found.end()
            return Reference(found[0])
        return None

    def _quoted(self) -> Text:
        pieces: list[str] = []
        while not self._accept('"'):
            pieces.append(self._character())
        return Text("".join(pieces))

    def _class(self) -> Node:
        negated = self._accept("^")
        ranges: list[tuple[int, int]] = []
        empty = True
        while not self._accept("]"):
            empty = False
            start = self._at
            low = high = ord(self._character())
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                high = ord(self._character())
            if high < low:
                text = self._text[start : self._at]
                raise _error(f"the range {safe_repr(text)} has no character: its end comes first")
            ranges.append((low, high))
        if empty:
            return Text("")  # as llama.cpp reads it
        found = united([tuple(ranges)])
        found = _without(found if negated else _without(found))  # no surrogates
        if not found:
            raise _error("a class has no character")
        return Characters(found)

    def _token(self, found: re.Match[str]) -> Token:
        negated = bool(found[1])
        if found[2] is not None:
            return Token(found[2], negated)
        if negated:
            raise _error(f"{safe_repr(found[0])} is not supported: write the token's id, !<[id]>")
        return Token(f"<{found[3]}>", negated)

    def _times(self, space: re.Pattern[str]) -> tuple[int, int | None] | None:
        """How often the part before it comes, if an operator says so."""
        for operator, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(operator):
                return times
        if not self._accept("{"):
            return None
        self._skip(space)
        least = most = self._number()
        self._skip(space)
        unlimited = False
        if self._accept(","):
            self._skip(space)
            unlimited = _NUMBER.match(self._text, self._at) is None
            most = least if unlimited else self._number()
            self._skip(space)
        self._expect("}")
        if least > _MOST_LEAST or most > _MOST_TIMES:
            raise _error(
                f"{{{least},{'' if unlimited else most}}}: expected at most {_MOST_LEAST} required "
                f"and {_MOST_TIMES} allowed repetitions; write {{m,}} for no limit"
            )
        if most < least:
            raise _error(f"{{{least},{most}}}: expected a first number that is not larger")
        return least, None if unlimited else most

    def _number(self) -> int:
        digits = self._match(_NUMBER, "a number")[0]
        return int(digits) if len(digits) < 10 else 10**10

    def _character(self) -> str:
        """A character of a text or class, which may be an escape."""
        if self._at >= len(self._text):
            raise _error("it ends inside of a text or class")
        character = self._text[self._at]
        self._at += 1
        if character != "\\":
            return character
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[kind]]
            self._at += _HEX_DIGITS[kind]
            if not re.fullmatch(f"[0-9a-fA-F]{{{_HEX_DIGITS[kind]}}}", digits):
                raise _error(f"the escape \\{kind} needs {_HEX_DIGITS[kind]} hexadecimal digits")
            code = int(digits, 16)
            if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                raise _error(f"\\{kind}{digits} is not a character")
            return chr(code)
        if kind not in _ESCAPES:
            raise _error(
                f"the escape {safe_repr(chr(92) + kind)} is unknown: expected one of \\n \\r \\t "
                '\\\\ \\" \\[ \\] \\- \\x \\u \\U'
            )
        return _ESCAPES[kind]

    def _skip(self, space: re.Pattern[str]) -> None:
        if (found := space.match(self._text, self._at)) is not None:
            self._at = found.end()

    def _accept(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._unexpected(repr(text))

    def _match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise self._unexpected(what)
        self._at = found.end()
        return found

    def _unexpected(self, expected: str) -> RequestError:
        found = self._text[self._at : self._at + 20]
        return _error(f"expected {expected}{self._place()}, found {safe_repr(found)}")

    def _place(self) -> str:
        return f" in line {self._text.count(chr(10), 0, self._at) + 1}"
