"""Keywords of JSON Schema that llguidance lacks, in terms of those it has. Every rewriting accepts
exactly the same values."""

from __future__ import annotations

import fractions
import json
from collections.abc import Iterator, Mapping
from typing import Any

from sdk.errors import RequestError
from sdk.quant.safe_repr import safe_repr

Schema = dict[str, Any]

#: The largest ``multipleOf``, without factors of ten: an automaton of 99,991 states takes 0.9 s.
_MAX_MULTIPLE = 10_000
#: ``format`` as RFC 3339 has it, exact to the day: llguidance's patterns allow February 30, the
#: year 0 and leap seconds, which Python's datetime does not.
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
#: Up to four labels without two hyphens in a row: those are internationalized names with rules that
#: no pattern has.
_LABEL = r"[A-Za-z0-9]{1,15}(?:-[A-Za-z0-9]{1,15}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
#: Formats with the same values as another one, or fewer.
_SAME = {
    "idn-email": "email",
    "iri": "uri",
    "uri-reference": "uri",
    "iri-reference": "uri",
    "url": "uri",
}
#: Formats that llguidance enforces, and the others of the specification, which nothing here does.
_ENFORCED = ("duration", "email", "ipv4", "ipv6", "uuid", "uri")
_NOT_ENFORCED = ("regex", "uri-template")
_TYPES = {"null", "boolean", "number", "string", "array", "object"}
#: Keywords that describe a value and do not restrict it.
_ANNOTATIONS = {"title", "description", "$comment", "examples", "default"}
#: Formats of OpenAPI that are ranges.
_NUMBERS = {"int32": (-(2**31), 2**31 - 1)}


#: Values nested deeper are rejected: the library's JSON reader stops at 128.
_MAX_DEPTH = 100
#: Keywords whose values are schemas, lists of them, or objects of them. Elsewhere (``const``,
#: ``enum``, ``default``) the same words are data.
_OF_SCHEMA = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_OF_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_OBJECT = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def rewritten(schema: Mapping[str, Any]) -> Schema:
    """A copy of a schema, in keywords that llguidance has.

    :raises RequestError: a keyword would be enforced wrongly or far too slowly.
    """
    copy: Schema = json.loads(json.dumps(schema))
    for found in schemas_in(copy):
        _rewrite(found)
    return copy


def schemas_in(schema: Any, depth: int = 0) -> Iterator[Schema]:
    """A schema and those inside it."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"json: schemas are nested more than {_MAX_DEPTH} deep")
    if not isinstance(schema, dict):
        return
    yield schema
    for key in _OF_SCHEMA:
        if isinstance(schema.get(key), dict):
            yield from schemas_in(schema[key], depth + 1)
    for key in _OF_LIST:
        if isinstance(schema.get(key), list):
            for item in schema[key]:
                yield from schemas_in(item, depth + 1)
    for key in _OF_OBJECT:
        if isinstance(schema.get(key), dict):
            for item in schema[key].values():
                yield from schemas_in(item, depth + 1)


def _rewrite(schema: Schema) -> None:
    """Rewrite the keywords of one schema in place; not those of schemas inside it."""
    _check_reference(schema)
    _check_multiple(schema)
    _check_min_properties(schema)
    _rewrite_not(schema)
    _rewrite_format(schema)
    _rewrite_dependencies(schema)
    _rewrite_property_names(schema)
    for name in ("minItems", "maxItems", "minLength", "maxLength", "minProperties"):
        _as_integer(schema, name)
    _as_integer(schema, "maxProperties")


def _as_integer(schema: Schema, name: str) -> None:
    """2.0 is a valid integer in JSON Schema."""
    value = schema.get(name)
    if isinstance(value, float) and value.is_integer():
        schema[name] = int(value)


def _check_reference(schema: Schema) -> None:
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise RequestError(
            f"json: $ref {safe_repr(reference)} is not supported: expected a reference inside the "
            "schema, such as '#/$defs/name'"
        )


def _check_multiple(schema: Schema) -> None:
    multiple = schema.get("multipleOf")
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or multiple <= 0:
        return
    number = fractions.Fraction(str(multiple)).numerator
    while number % 10 == 0:
        number //= 10
    if number > _MAX_MULTIPLE:
        raise RequestError(
            f"json: multipleOf {multiple} is not supported: expected at most {_MAX_MULTIPLE}, "
            "times a power of ten"
        )


def _check_min_properties(schema: Schema) -> None:
    """Additional properties may have equal names, of which a reader keeps one."""
    least = schema.get("minProperties")
    required = schema.get("required")
    certain = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(certain, 1):
        raise RequestError(
            f"json: minProperties {least} is not supported: only properties in 'required' are "
            "certain to be different; list them there"
        )


def _rewrite_format(schema: Schema) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or name in _ENFORCED:
        return
    if name in _NOT_ENFORCED:
        raise RequestError(f"json: format {name!r} is not supported; remove it, or use 'pattern'")
    del schema["format"]
    if name in _SAME:
        schema["format"] = _SAME[name]
    elif name in _PATTERNS:
        _require(schema, {"type": "string", "pattern": f"^(?:{_PATTERNS[name]})$"})
    elif name in _NUMBERS and schema.get("type") in ("integer", "number"):
        low, high = _NUMBERS[name]
        schema.setdefault("minimum", low)
        schema.setdefault("maximum", high)
    # Any other name is an annotation: the specification does not define it.


def _require(schema: Schema, pattern: Schema) -> None:
    """Add a pattern for strings to a schema, whose other types stay as they are."""
    if schema.get("type") == "string" and "pattern" not in schema:
        schema.update(pattern)
        return
    others = ["null", "boolean", "number", "array", "object"]
    schema.setdefault("allOf", []).append({"anyOf": [{"type": others}, pattern]})


def _rewrite_not(schema: Schema) -> None:
    """``not`` of types, of required properties, of ``not`` and of ``anyOf``."""
    inner = schema.get("not")
    if inner is False:
        del schema["not"]
    if not isinstance(inner, dict):
        return
    keys = inner.keys() - _ANNOTATIONS
    types = inner.get("type")
    named = {types} if isinstance(types, str) else set(types or ())
    if keys == {"required"}:
        absent = [{"properties": {name: False}} for name in inner["required"]]
        found: list[Schema] = [{"type": "object", "anyOf": absent}]
    elif keys == {"type"} and (named & {"number", "integer"}) != {"integer"}:
        found = [{"type": sorted(_TYPES - named)}]
    elif keys == {"not"}:
        found = [inner["not"]]
    elif keys == {"anyOf"}:
        found = [{"not": item} for item in inner["anyOf"]]
    else:
        return
    del schema["not"]
    schema.setdefault("allOf", []).extend(found)


def _rewrite_dependencies(schema: Schema) -> None:
    """If one property is present, others must be, or a schema must fit."""
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        rules = schema.get(keyword)
        if not isinstance(rules, dict):
            continue
        del schema[keyword]
        for name, rule in rules.items():
            fits = {"required": rule} if isinstance(rule, list) else rule
            absent = {"properties": {name: False}}
            schema.setdefault("allOf", []).append({"anyOf": [absent, fits]})


def _rewrite_property_names(schema: Schema) -> None:
    """Names become patterns of properties, where nothing else names properties."""
    names = schema.get("propertyNames")
    if names is True or names == {}:
        del schema["propertyNames"]
        return
    others = {"properties", "patternProperties", "required", "allOf", "anyOf", "oneOf", "$ref"}
    if not isinstance(names, dict) or others & schema.keys():
        return
    value = schema.get("additionalProperties", {})
    kinds = names.keys() - _ANNOTATIONS - {"type"}
    if kinds == {"pattern"}:
        schema["patternProperties"] = {names["pattern"]: value}
    elif kinds == {"enum"} and all(isinstance(item, str) for item in names["enum"]):
        schema["properties"] = dict.fromkeys(names["enum"], value)
    elif kinds and kinds <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        schema["patternProperties"] = {f"^(?s:.){{{least},{most}}}$": value}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False
