"""What llguidance compiles: structures of a request as its JSON schemas, patterns and grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sdk.api.errors import RequestError
from sdk.api.structured_params import MAX_TEXT, StructuredOutputsParams
from sdk.quant.safe_repr import lone_surrogate, safe_repr
from sdk.structured import lark
from sdk.structured.document import schemas_in
from sdk.structured.gbnf import is_gbnf
from sdk.structured.gbnf_lark import lark_of
from sdk.structured.limits import check_pattern
from sdk.structured.rewriting import WHITESPACE, rewritten
from sdk.structured.structural_tags import lark_of_tag

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
    found = _DEFINITIONS[params.kind](params, is_special)
    return found._replace(text=_unicode(params.kind, found.text))


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
    _unicode("json", json.dumps(prepared, ensure_ascii=False))
    return prepared


def _unicode(name: str, text: str) -> str:
    """The text with surrogate pairs as characters. :raises RequestError: there is half a pair."""
    if (half := lone_surrogate(text)) is not None:
        raise RequestError(f"{name}: expected Unicode text, found the lone surrogate {half}")
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


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
    tag = params.structural_tag
    assert isinstance(tag, Mapping)
    _unicode("structural_tag", json.dumps(tag, ensure_ascii=False))
    text = lark_of_tag(
        tag,
        lambda schema: _json_definition(_prepared(schema, params)).text,
        lambda pattern: f"/{_unslashed(_ascii_digits(pattern))}/",
        is_special,
    )
    _check_length("structural_tag", text)
    return Definition("lark", text)


def _unslashed(pattern: str) -> str:
    """A pattern between slashes."""
    return re.sub(
        r"\\.|/", lambda part: r"\/" if part[0] == "/" else part[0], pattern, flags=re.DOTALL
    )


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
