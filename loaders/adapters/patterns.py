"""The keys of PEFT's ``rank_pattern`` and ``alpha_pattern``: regular expressions from a file.

Python's ``re`` needs exponential time for some expressions, and these come from strangers. So they
are matched here, by the set of positions that each part of an expression can reach: that takes
``O(length of the expression * length of the name ** 2)``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from sdk.quant.errors import UnsupportedError

#: Longest expression, and the largest bound of ``{m,n}``.
MAX_LENGTH = 4096
_MAX_REPEATS = 64
_MAX_DEPTH = 16
T = TypeVar("T")
#: Whether a key matches the path of a module.
Matcher = Callable[[str], bool]
#: Where a part of an expression may begin in the name -> where it may then end.
_Part = Callable[[str, set[int]], set[int]]
#: Keys without repetitions and alternatives, which ``re`` matches in linear time.
_SIMPLE = re.compile(r"\^?(?:[\w.-]|\\[.-])+\$?")


def find(patterns: Iterable[tuple[Matcher, T]], path: str, default: T) -> T:
    """The value of the first key that matches ``path``."""
    return next((value for matches, value in patterns if matches(path)), default)


def is_simple(text: str) -> bool:
    """Whether a key is a plain name, or nearly so."""
    return _SIMPLE.fullmatch(text) is not None


def compile_pattern(text: str, source: str) -> Matcher:
    """What PEFT tests with ``re.match(rf"(.*\\.)?({text})$", path)``: the end of a module's path.

    ``source`` names the file and the field in errors.

    :raises UnsupportedError: it is not a regular expression, or uses something other than literals,
        ``.``, escapes, classes, groups, alternatives, repetitions, ``^`` and ``$``.
    """
    if len(text) > MAX_LENGTH:
        raise UnsupportedError(
            f"{source}: a pattern of {len(text)} characters, at most {MAX_LENGTH} are supported"
        )
    if is_simple(text):
        found = re.compile(rf"(?:.*\.)?(?:{text})$")
        return lambda path: found.match(path) is not None
    anchored = text.startswith("^")
    body = text[anchored:]
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    part = _Parser(body, source).parse()

    def matches(path: str) -> bool:
        starts = {0} if anchored else {0, *(i + 1 for i, c in enumerate(path) if c == ".")}
        return len(path) in part(path, starts)

    return matches


class _Parser:
    """Parses one expression, front to back."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._at = 0

    def parse(self) -> _Part:
        part = self._alternatives(0)
        if self._at < len(self._text):
            raise self._fail("an unbalanced )")
        return part

    def _fail(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._source}: the pattern {self._text[:200]!r} has {what}, which is not supported"
        )

    def _alternatives(self, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise self._fail(f"more than {_MAX_DEPTH} nested groups")
        ways = [self._sequence(depth)]
        while self._text[self._at : self._at + 1] == "|":
            self._at += 1
            ways.append(self._sequence(depth))
        return ways[0] if len(ways) == 1 else _any_of(ways)

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return _in_order(parts)

    def _atom(self, depth: int) -> _Part:
        text, at = self._text, self._at
        character = text[at]
        self._at += 1
        if character == "(":
            if text.startswith("?:", self._at):
                self._at += 2
            elif text.startswith("?", self._at):
                raise self._fail("a group with (?")
            inner = self._alternatives(depth + 1)
            if text[self._at : self._at + 1] != ")":
                raise self._fail("an unbalanced (")
            self._at += 1
            return inner
        if character in "*+?{^$":
            raise self._fail(f"{character} in this place")
        if character == "[":
            end = text.find("]", at + 2 + text.startswith("^", at + 1))
            if end < 0:
                raise self._fail("an unbalanced [")
            self._at = end + 1
            return self._one(text[at : end + 1])
        if character == "\\":
            self._at += 1
            escaped = text[at + 1 : at + 2]
            if not escaped or (escaped.isalnum() and escaped not in "dDwWsS"):
                raise self._fail(f"\\{escaped}")
            return self._one(text[at : at + 2])
        return self._one(character)

    def _one(self, text: str) -> _Part:
        """A part that is one character."""
        try:
            matches = re.compile(text).fullmatch
        except re.error:
            raise self._fail(repr(text)) from None
        return lambda name, starts: {
            at + 1 for at in starts if at < len(name) and matches(name[at]) is not None
        }

    def _repeated(self, part: _Part) -> _Part:
        found = re.compile(r"([*+?])|\{(\d{1,3})(,(\d{0,3}))?\}").match(self._text, self._at)
        if found is None:
            return part
        self._at = found.end()
        if self._text[self._at : self._at + 1] in ("*", "+", "?", "{"):
            raise self._fail("a repetition of a repetition, or a lazy one")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1), None: (0, 0)}[found[1]]
        if found[1] is None:
            least = int(found[2])
            most = least if found[3] is None else int(found[4]) if found[4] else None
        if max(least, most or 0) > _MAX_REPEATS:
            raise self._fail(f"a repetition of more than {_MAX_REPEATS}")
        return _repeat(part, least, most)


def _in_order(parts: list[_Part]) -> _Part:
    def run(name: str, starts: set[int]) -> set[int]:
        for part in parts:
            starts = part(name, starts)
        return starts

    return run


def _any_of(ways: list[_Part]) -> _Part:
    return lambda name, starts: set().union(*(way(name, starts) for way in ways))


def _repeat(part: _Part, least: int, most: int | None) -> _Part:
    def run(name: str, starts: set[int]) -> set[int]:
        for _ in range(least):
            starts = part(name, starts)
        ends, new, count = set(starts), starts, least
        while new and (most is None or count < most):
            new = part(name, new) - ends
            ends |= new
            count += 1
        return ends

    return run
