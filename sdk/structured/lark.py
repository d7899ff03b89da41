"""Grammars in llguidance's dialect of Lark, before they reach it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sdk.api.errors import RequestError
from sdk.structured.document import Schema
from sdk.structured.limits import check_pattern, check_rules

#: As llguidance's lexer reads it: comments, texts, regular expressions (which may have several
#: lines), directives, rules and terminals at the beginning of a line, other names, and brackets.
_PART = re.compile(
    r"(?P<skip>(?:\#|//)[^\n]*"
    r'|"(?:\\.|[^"\\\n])*"i?'
    r"|/(?:\\.|[^/\\])+/[imslux]*"
    r"|%(?:import|declare)\b[^\n]*|->[ \t]*\w+"
    r"|@[\w-]+|<[^<>\s]+>|\b\d[\w.]*)"
    r"|(?P<directive>%\w+)"
    r"|(?<![^\n])[ \t]*(?P<head>[!?_]*[A-Za-z][\w-]*)"
    r"(?:::_|\{[^}\n]*\}|\.[+-]?\d+|[ \t]|\[[^\]\n]*\])*:"
    r"|(?P<name>[!?_]*[A-Za-z][\w-]*)"
    r"|(?P<open>[(\[{])|(?P<close>[)\]}])"
)
_DECODER = json.JSONDecoder()
#: Directives that are followed by a JSON object.
_OF_OBJECT = ("%json", "%regex", "%llguidance")


def checked(text: str, prepared: Callable[[Schema], Schema]) -> str:
    """The grammar with its schemas (``%json``) as ``prepared`` makes them.

    :raises RequestError: a schema is invalid or not supported, or rules are nested too deep.
    """
    pieces: list[str] = []
    weights: dict[str, int] = {"": 1}
    edges: dict[str, list[str]] = {"": []}
    rule, depth, at = "", 0, 0
    while (part := _PART.search(text, at)) is not None:
        pieces.append(text[at : part.start()])
        kind, found, at = part.lastgroup, part[0], part.end()
        if kind == "directive" and found in _OF_OBJECT:
            value, end = _object(text, at, found)
            if found == "%json":
                pieces.append(f"%json {json.dumps(prepared(value), ensure_ascii=False)}")
            else:
                pieces.append(text[part.start() : end])
            at = end
            continue
        pieces.append(found)
        if found.startswith("/"):
            check_pattern("grammar", found)
        if kind == "head" and depth == 0:
            rule = part["head"].lstrip("!?")
            weights.setdefault(rule, 1)
            edges.setdefault(rule, [])
        elif kind in ("head", "name"):
            edges[rule].append(part[kind].lstrip("!?"))
        elif kind == "open":
            depth += 1
            weights[rule] = max(weights[rule], 1 + depth)
        elif kind == "close":
            depth = max(depth - 1, 0)
    pieces.append(text[at:])
    # A rule that was not recognized as one counts as part of the one before it: with all of them.
    missing = {name for names in edges.values() for name in names} - weights.keys()
    if missing:
        weights = {**weights, **dict.fromkeys(missing, 1)}
        edges |= {name: list(weights) for name in missing}
    check_rules(weights, edges)
    return "".join(pieces)


def _object(text: str, at: int, directive: str) -> tuple[dict[str, Any], int]:
    """The JSON object after a directive, and where it ends."""
    start = at + len(text[at:]) - len(text[at:].lstrip())
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"grammar: {directive} is not followed by valid JSON: {error}"
        ) from error
    if not isinstance(value, dict):
        raise RequestError(
            f"grammar: expected a JSON object after {directive}, found {value!r:.60}"
        )
    return value, end
