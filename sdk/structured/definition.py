"""What llguidance compiles: structures of a request as its JSON schemas, patterns and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sdk.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.structured import lark
from sdk.structured.document import schemas_in
from sdk.structured.gbnf import is_gbnf
from sdk.structured.gbnf_lark import lark_of
from sdk.structured.limits import check_pattern
from sdk.structured.params import MAX_TEXT, StructuredOutputsParams
from sdk.structured.rewriting import WHITESPACE, rewritten

Schema = dict[str, Any]
_ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}


class Definition(NamedTuple):
    """``kind`` and ``text`` for the library (``json_schema``, ``regex``, ``lark``).

    ``hints``: literals of patterns, which may be needed to complete a text.
    """

    kind: str
    text: str
    hints: tuple[str, ...] = ()


def definition_of(params: StructuredOutputsParams, is_special: Callable[[str], bool]) -> Definition:
    """``is_special``: whether a text is a control token of the model.

    :raises RequestError: a construct is not supported; the message names it.
    """
    return _DEFINITIONS[params.kind](params, is_special)


def _json(params: StructuredOutputsParams, _: Callable[[str], bool]) -> Definition:
    schema = {"type": "object"} if params.json is None else params.json
    return _json_definition(_prepared(schema, params))


def _json_definition(schema: Schema) -> Definition:
    text = json.dumps(schema)
    every = [schema, *schema.get("$defs", {}).values()]
    patterns = [x["pattern"] for one in every for x in schemas_in(one) if "pattern" in x]
    return Definition("json_schema", text, _literals(patterns))


def _prepared(schema: Schema, params: StructuredOutputsParams) -> Schema:
    """The schema in keywords that the library has, with the whitespace of ``params``."""
    if not isinstance(schema, dict):
        raise RequestError(f"json: expected a schema, found {safe_repr(schema)}")
    prepared = rewritten(schema, closed=params.disable_additional_properties)
    guidance: Schema = WHITESPACE
    if params.disable_any_whitespace:
        guidance = {"whitespace_flexible": False}
    if params.whitespace_pattern is not None:
        _check_length("whitespace_pattern", params.whitespace_pattern)
        check_pattern("whitespace_pattern", params.whitespace_pattern)
        guidance = {"whitespace_pattern": params.whitespace_pattern}
    prepared["x-guidance"] = guidance
    return prepared


def _regex(params: StructuredOutputsParams, _: Callable[[str], bool]) -> Definition:
    assert params.regex is not None
    _check_length("regex", params.regex)
    check_pattern("regex", params.regex)
    return Definition("regex", _ascii_digits(params.regex), _literals([params.regex]))


def _ascii_digits(pattern: str) -> str:
    r"""The pattern with ``\d`` as 0 to 9, as in JSON Schema; the library's has all of Unicode's."""
    digits = {r"\d": "[0-9]", r"\D": "[^0-9]"}
    return re.sub(r"\\.", lambda found: digits.get(found[0], found[0]), pattern, flags=re.DOTALL)


def _choice(params: StructuredOutputsParams, _: Callable[[str], bool]) -> Definition:
    assert params.choice is not None
    text = "start: " + " | ".join(json.dumps(item, ensure_ascii=False) for item in params.choice)
    return Definition("lark", text)


def _grammar(params: StructuredOutputsParams, _: Callable[[str], bool]) -> Definition:
    assert params.grammar is not None
    text = params.grammar
    _check_length("grammar", text)
    if is_gbnf(text):
        text = lark_of(text)
    text = lark.checked(text, lambda schema: _prepared(schema, params))
    _check_length("grammar", text)
    return Definition("lark", text, _literals(re.findall(r'"(?:[^"\\\n]|\\.)*"|/[^/\n]+/', text)))


def _structural_tag(
    params: StructuredOutputsParams, is_special: Callable[[str], bool]
) -> Definition:
    """Free text with tagged structures (the format of vLLM and xgrammar): ``structures`` with
    ``begin``, ``schema`` and ``end``, and ``triggers``, each the beginning of some ``begin``."""
    tag = params.structural_tag
    assert isinstance(tag, Mapping)
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise RequestError(
            "structural_tag: expected {'structures': [{'begin': ..., 'schema': ..., 'end': ...}], "
            f"'triggers': [...]}}, found {safe_repr(tag)}"
        )
    rules, names = [], []
    for index, one in enumerate(structures):
        begin, end, schema = _tag_parts(one)
        trigger = next(
            (t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None
        )
        if trigger is None:
            raise RequestError(
                f"structural_tag: expected a trigger that {begin!r} begins with, found "
                f"{safe_repr(triggers)}"
            )
        inner = _json_definition(_prepared(schema, params))
        rest = " ".join(json.dumps(part) for part in (begin.removeprefix(trigger),) if part)
        tail = json.dumps(end) if end else ""
        body = f"{rest} %json {inner.text} {tail}"
        names.append(f"tag_{index}")
        if is_special(trigger):
            rules.append(f"tag_{index}: TEXT {_token_name(trigger)} {body}")
        else:
            rules.append(f"head_{index}[lazy]: TEXT {json.dumps(trigger)}")
            rules.append(f"tag_{index}: head_{index} {body}")
    text = f"start: ({' | '.join(names)})* rest\nrest: TEXT\nTEXT: /(.|\\n)*/\n" + "\n".join(rules)
    return Definition("lark", text)


def _tag_parts(one: Any) -> tuple[str, str, Schema]:
    if not isinstance(one, Mapping) or not isinstance(one.get("begin"), str):
        raise RequestError(
            f"structural_tag: expected a structure with 'begin', 'schema' and 'end', found "
            f"{safe_repr(one)}"
        )
    schema, end = one.get("schema", {}), one.get("end", "")
    if not isinstance(schema, dict) or not isinstance(end, str):
        raise RequestError(
            f"structural_tag: expected a schema and a string as 'end', found {safe_repr(one)}"
        )
    return one["begin"], end, schema


def _token_name(text: str) -> str:
    """A control token in the library's Lark notation: ``<|name|>``."""
    return text if re.fullmatch(r"<[^<>\s]+>", text) else json.dumps(text)


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise RequestError(f"{name}: expected at most {MAX_TEXT} characters, found {len(text)}")


def _literals(patterns: list[str]) -> tuple[str, ...]:
    """Runs of plain characters in patterns, single ones and ends of lines, at most 64."""
    found: dict[str, None] = {}
    for escape, character in _ESCAPES.items():
        if any(escape in pattern for pattern in patterns):
            found[character] = None
    for pattern in patterns:
        for run in re.findall(r"[A-Za-z0-9_ \-]+", pattern):
            found[run] = None
            found.update(dict.fromkeys(run))
    return tuple(found)[:64]


_DEFINITIONS = {
    "json": _json,
    "json_object": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}
