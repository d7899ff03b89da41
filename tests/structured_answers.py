"""Structures, with a check of their answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}
EXPRESSION = """
start: term (("+" | "-") term)*
term: NUMBER | "(" start ")"
NUMBER: /[1-9][0-9]{0,3}/
"""


def _is_valid(schema: dict[str, Any]) -> Callable[[str], bool]:
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    return lambda text: validator.is_valid(json.loads(text))


def _is_expression(text: str) -> bool:
    assert re.fullmatch(r"[0-9()+-]+", text)
    return isinstance(eval(text), int)


#: By name: the parameters of a structure, and whether an answer has it.
STRUCTURES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "object": ({"json": PERSON}, _is_valid(PERSON)),
    "text of a schema": ({"json": json.dumps(PERSON)}, _is_valid(PERSON)),
    "any object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    "number": ({"json": float}, lambda text: isinstance(json.loads(text), int | float)),
    "date": (
        {"json": {"type": "string", "format": "date"}},
        _is_valid({"type": "string", "format": "date"}),
    ),
    "regex": (
        {"regex": r"[a-c]{2,6}-\d{3}"},
        lambda text: bool(re.fullmatch(r"[a-c]{2,6}-[0-9]{3}", text)),
    ),
    "choice": (
        {"choice": ["yes", "no", "ma\"y'be\n", "né"]},
        ["yes", "no", "ma\"y'be\n", "né"].__contains__,
    ),
    "grammar": ({"grammar": EXPRESSION}, _is_expression),
    "gbnf": (
        {"grammar": 'root ::= item ("," item)*\nitem ::= "a" | "b" [0-9]+'},
        lambda text: bool(re.fullmatch(r"(a|b[0-9]+)(,(a|b[0-9]+))*", text)),
    ),
    "compact": ({"json": PERSON, "disable_any_whitespace": True}, _is_valid(PERSON)),
    "spread out": ({"json": PERSON, "whitespace_pattern": r"[ \n]{0,2}"}, _is_valid(PERSON)),
}
