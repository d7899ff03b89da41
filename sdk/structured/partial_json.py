"""The value of JSON text that is not complete yet."""

from __future__ import annotations

import json
import re
from typing import Any

_STRING = re.compile(r'"(?:[^"\\]|\\.)*("?)', re.DOTALL)
_PLAIN = re.compile(r"[^\s\[\]{},:\"]+")
#: An escape that is not complete: a backslash, or a part of \uXXXX or of a pair of them.
_CUT_ESCAPE = re.compile(r"(?:\\u[dD][89abAB][0-9a-fA-F]{2})?\\(?:u[0-9a-fA-F]{0,3})?$")
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def partial_value(text: str, *, ended: bool = False) -> Any:
    """The value so far; ``None`` if it has not begun.

    Open objects, arrays and strings are closed. A name without its value, and a number or word at
    the end of the text are left out (unless it has ``ended``), because they may go on.
    """
    closed = text if ended else _closed(text)
    try:
        return json.loads(closed)
    except ValueError:
        return None if not ended else partial_value(text)


def _closed(text: str) -> str:
    """The text up to the last complete value, or within a string, with everything closed."""
    stack: list[str] = []
    safe, closers, is_name, at = 0, "", False, 0
    while at < len(text):
        character = text[at]
        if character == '"':
            match = _STRING.match(text, at)
            assert match is not None
            if not match[1]:
                return (
                    text[:safe] + closers if is_name else _cut(text, at) + '"' + closers_of(stack)
                )
            at = match.end()
            if is_name:
                continue
        elif character in "{[":
            stack.append("}" if character == "{" else "]")
            at += 1
            is_name = character == "{"
            safe, closers = at, closers_of(stack)
            continue
        elif character in "}]":
            if stack:
                stack.pop()
            at += 1
        elif character == ",":
            is_name = bool(stack) and stack[-1] == "}"
            at += 1
            continue
        elif character == ":":
            is_name = False
            at += 1
            continue
        elif (plain := _PLAIN.match(text, at)) is not None:
            at = plain.end()
            if at == len(text):  # a number or a word that may go on
                return text[:safe] + closers
        else:
            at += 1
            continue
        safe, closers = at, closers_of(stack)
    return text[:safe] + closers


def closers_of(stack: list[str]) -> str:
    """What closes the open objects and arrays."""
    return "".join(reversed(stack))


def _cut(text: str, begin: int) -> str:
    """The text without an escape that is cut off at its end. It is in the string at ``begin``."""
    string = text[begin:]
    match = _CUT_ESCAPE.search(string) or _HIGH_SURROGATE.search(string)
    if match is None or _escaped(string, match.start()):
        return text
    return text[: begin + match.start()]


def _escaped(string: str, at: int) -> bool:
    """Whether the character at ``at`` is itself escaped by a backslash."""
    count = 0
    while count < at and string[at - 1 - count] == "\\":
        count += 1
    return count % 2 == 1
