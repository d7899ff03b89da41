"""``patternProperties`` that need not be patterns, as ``properties`` or for all of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from sdk.structured.document import Document, Schema, also, is_free

#: Python's parser of patterns, which has no other name. Its trees are documented by its output.
_parser: Any = vars(re)["_parser"]
_BEGIN, _END = "<begin>", "<end>"
_CLASSES = {"CATEGORY_DIGIT": "0123456789"}
#: Repetitions and characters of a class that are read. A class with more has names nobody lists.
_MOST = 128
#: Spellings of a pattern that are read.
_MOST_NAMES = 100_000


def rewrite_patterns(schema: Schema, document: Document) -> None:
    """Patterns that match every name hold for all properties; the library refuses patterns that
    overlap. Those that match only listed names become properties: the library would allow such a
    name, and then no character of it, because the listed ones come before it."""
    patterns = schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    kept: Schema = {}
    named: dict[str, list[Any]] = {}
    for pattern, value in patterns.items():
        if matches_all(pattern):
            schema.pop("additionalProperties", None)
            also(schema, *([] if is_free(value) else [{"additionalProperties": value}]))
        elif (names := names_among(pattern, document.texts)) is not None:
            for name in names:
                named.setdefault(name, []).append(value)
        else:
            kept[pattern] = value
    if "additionalProperties" not in schema:
        kept = {pattern: value for pattern, value in kept.items() if not is_free(value)}
    if named:
        listed = dict(schema.get("properties", {}))
        for name, values in named.items():
            every = [listed[name], *values] if name in listed else values
            listed[name] = every[0] if len(every) == 1 else {"allOf": every}
        schema["properties"] = listed
    schema["patternProperties"] = kept  # in its place: the library reads keywords in their order
    if not kept:
        del schema["patternProperties"]


def matches_all(pattern: str) -> bool:
    """Whether a pattern matches somewhere in every text: it matches nothing, anywhere."""
    if pattern == "$":
        return True
    pattern = pattern.removeprefix("^")
    try:
        return not re.search(r"[\^\$\\(]", pattern) and re.search(pattern, "") is not None
    except re.error:
        return False


def names_among(pattern: str, texts: frozenset[str]) -> list[str] | None:
    """All names that match a pattern if they are among ``texts``, else ``None``."""
    found: dict[str, None] = {}
    try:
        for parts in itertools.islice(_spellings(_parser.parse(pattern)), _MOST_NAMES):
            if parts[:1] != (_BEGIN,) or parts[-1:] != (_END,):
                return None
            name = "".join(parts[1:-1])
            if any(mark in parts[1:-1] for mark in (_BEGIN, _END)) or name not in texts:
                return None
            found[name] = None
        return list(found)
    except (re.error, ValueError, OverflowError, RecursionError, _Endless):
        return None


class _Endless(Exception):
    """A part of a pattern has more spellings than names are listed."""


def _spellings(nodes: Iterable[Any]) -> Iterator[tuple[str, ...]]:
    """The characters and marks of each text of a sequence."""
    nodes = list(nodes)
    if not nodes:
        yield ()
        return
    (kind, value), rest = nodes[0], nodes[1:]
    for first in _of_node(str(kind), value):
        for more in _spellings(rest):
            yield (*first, *more)


def _of_node(kind: str, value: Any) -> Iterator[tuple[str, ...]]:
    if kind == "LITERAL":
        yield (chr(value),)
    elif kind == "IN":
        yield from ((one,) for one in _of_class(value))
    elif kind == "BRANCH":
        for branch in value[1]:
            yield from _spellings(branch)
    elif kind == "SUBPATTERN":
        yield from _spellings(value[-1])
    elif kind == "AT" and str(value) in ("AT_BEGINNING", "AT_END"):
        yield (_BEGIN if str(value) == "AT_BEGINNING" else _END,)
    elif kind in ("MAX_REPEAT", "MIN_REPEAT") and value[1] <= _MOST:
        for count in range(value[0], value[1] + 1):
            yield from _spellings([one for _ in range(count) for one in value[2]])
    else:
        raise _Endless


def _of_class(value: Any) -> str:
    found = ""
    for kind, one in value:
        if str(kind) == "LITERAL":
            found += chr(one)
        elif str(kind) == "RANGE" and one[1] - one[0] < _MOST:
            found += "".join(map(chr, range(one[0], one[1] + 1)))
        elif str(kind) == "CATEGORY" and str(one) in _CLASSES:
            found += _CLASSES[str(one)]
        else:
            raise _Endless
    return found
