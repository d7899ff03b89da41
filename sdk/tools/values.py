"""Values of arguments that are not written as JSON, by the schema of their parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdk.tools.literals import literal_of, number_of
from sdk.tools.stream import NotACallError

#: References of a schema are followed at most this often.
_MAX_REFERENCES = 16
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def parameter_schema(parameters: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The schema of one parameter, with the definitions that it may refer to."""
    properties = parameters.get("properties")
    return inner_schema(parameters, properties.get(name) if properties else None)


def inner_schema(schema: Mapping[str, Any], part: object) -> dict[str, Any]:
    """A part of a schema, with the definitions that it may refer to; references are followed."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for _ in range(_MAX_REFERENCES):
        if not isinstance(part, Mapping):
            return {}
        if not isinstance(reference := part.get("$ref"), str):
            break
        part = _resolve(reference, schema)
    return {**shared, **part} if isinstance(part, Mapping) else {}


def types_of(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that a schema allows; ``None`` if it does not say."""
    return _types(schema, schema, _MAX_REFERENCES)


def is_only(schema: Mapping[str, Any], kind: str) -> bool:
    """Whether a schema allows values of only one type."""
    return types_of(schema) == frozenset({kind})


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return frozenset(map(_type_of, values)) if isinstance(values, list) else None
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, depth - 1)
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list):
            found = [_types(part, root, depth - 1) for part in parts]
            known = [one for one in found if one is not None]
            return frozenset().union(*known) if len(known) == len(found) else None
    if isinstance(parts := schema.get("allOf"), list):
        found = [_types(part, root, depth - 1) for part in parts]
        return next((one for one in found if one is not None), None)
    return None


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What ``#/$defs/Name`` refers to."""
    found: Any = root
    for key in reference.removeprefix("#/").split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def from_text(text: str, schema: Mapping[str, Any]) -> Any:
    """The value that plain text stands for: by the types of the schema, else the text itself.

    Without a schema only text that is JSON and not a string is converted.
    """
    types = types_of(schema)
    if is_only(schema, "string") or text in schema.get("enum", ()):
        return text
    word = text.strip()
    if types is None:
        return _json(word, text)
    lowered = word.lower()
    if lowered in _CONSTANTS and _type_of(_CONSTANTS[lowered]) in types:
        return _CONSTANTS[lowered]
    if types & {"integer", "number"}:
        number = number_of(word)
        if isinstance(number, int) or (number is not None and "number" in types):
            return number
        if number is not None and number.is_integer():
            return int(number)
    if types & {"array", "object"} and word[:1] in ("[", "{", "("):
        value = _json(word, text)
        return text if value is text else to_schema(value, schema)
    if "string" not in types and word[:1] in ('"', "'"):  # written with quotes: "3"
        quoted = _literal(word)
        if isinstance(quoted, str) and quoted[:1] not in ('"', "'"):
            return from_text(quoted, schema)
    return text


def to_schema(value: Any, schema: Mapping[str, Any]) -> Any:
    """A written value as the schema wants it: models quote numbers, and leave out quotes. The
    elements of a list and the properties of an object too."""
    types = types_of(schema)
    if types is None:
        return value
    if isinstance(value, str) and "string" not in types:
        return from_text(value, schema)
    if isinstance(value, list) and "array" in types:
        return [_part(one, schema, _of_item(schema, index)) for index, one in enumerate(value)]
    if isinstance(value, dict) and "object" in types:
        return {name: _part(one, schema, _of_name(schema, name)) for name, one in value.items()}
    if value == {} and isinstance(value, dict) and is_only(schema, "array"):
        return []  # Python has no other way to write an empty set
    if isinstance(value, float) and "number" not in types and value.is_integer():
        return int(value) if "integer" in types else value
    if is_only(schema, "string") and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


def _part(value: Any, schema: Mapping[str, Any], part: object) -> Any:
    return to_schema(value, inner_schema(schema, part)) if isinstance(part, Mapping) else value


def _of_item(schema: Mapping[str, Any], index: int) -> object:
    first = _branch(schema, "array").get("prefixItems")
    if isinstance(first, list) and index < len(first):
        return first[index]
    return _branch(schema, "array").get("items")


def _of_name(schema: Mapping[str, Any], name: str) -> object:
    schema = _branch(schema, "object")
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return schema.get("additionalProperties")


def _branch(schema: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The only part of a union that allows a type; a schema without one is that part itself."""
    if "$ref" in schema:
        schema = inner_schema(schema, schema)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            inner = [inner_schema(schema, part) for part in parts]
            fitting = [one for one in inner if kind in (types_of(one) or {kind})]
            return _branch(fitting[0], kind) if len(fitting) == 1 else {}
    return schema


def dump(value: Any) -> str:
    """JSON text. :raises NotACallError: it has none."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise NotACallError(f"an argument has no JSON: {error}") from error


def _json(word: str, text: str) -> Any:
    """The value of JSON or of a Python literal; a string, or anything else, is the text itself."""
    try:
        value = json.loads(word)
    except (ValueError, RecursionError):
        value = _literal(word) if word[:1] in ("[", "{", "(") else text
    return text if isinstance(value, str) else value


def _literal(word: str) -> Any:
    """The value of a Python literal; other text itself."""
    try:
        return literal_of(word)
    except NotACallError:
        return word
