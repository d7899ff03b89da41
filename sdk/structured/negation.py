"""Schemas for the values that another schema rejects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from sdk.structured.document import TYPES, Document, Schema
from sdk.structured.formats import is_format

#: Strings longer than this are not excluded: their pattern is nested too deep.
_MOST_CHARACTERS = 60
#: Positions that are tried for one element of an array of any length.
POSITIONS = 4
#: Keywords that restrict a value and whose opposite no schema here expresses.
_NO_OPPOSITE = {
    *("pattern", "multipleOf", "additionalProperties", "patternProperties", "propertyNames"),
    *("uniqueItems", "unevaluatedProperties", "unevaluatedItems", "maxContains"),
}


def negation(schema: Any, document: Document, depth: int = 0) -> Any:
    """A schema that accepts only values that ``schema`` rejects; ``None`` if there is none here.

    It accepts all of them unless part of ``schema`` has no opposite, such as a pattern beside a
    type. ``schema`` must be as the caller wrote it: the opposite of fewer values would be too many.
    """
    document.work(depth)
    if not isinstance(schema, dict):
        return schema is False
    ways: list[Any] = []
    unknown = False
    for way in _ways(schema, document, depth + 1):
        unknown |= way is None
        ways += [way] if way not in (None, False) else []
    if True in ways:
        return True
    if not ways:
        return None if unknown else False
    return ways[0] if len(ways) == 1 else {"anyOf": ways}


def _ways(schema: Schema, document: Document, depth: int) -> Iterator[Any]:
    """Ways to violate a schema, one keyword each; ``None`` where there is no schema for it."""
    if isinstance(schema.get("$ref"), str):
        yield document.negated(schema["$ref"])
    if "type" in schema:
        named = _types(schema["type"])
        yield (
            {"type": [name for name in TYPES if name not in named]} if named < set(TYPES) else False
        )
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            yield _other_than(values)
    if "not" in schema:
        yield schema["not"]
    for part in _list(schema, "allOf"):
        yield negation(part, document, depth)
    if "anyOf" in schema:
        yield _all(negation(part, document, depth) for part in _list(schema, "anyOf"))
    if "oneOf" in schema:
        yield from _none_or_two(_list(schema, "oneOf"), document, depth)
    if "if" in schema:
        fits, fails = schema["if"], negation(schema["if"], document, depth)
        yield _all([fits, negation(schema.get("then", True), document, depth)])
        yield _all([fails, negation(schema.get("else", True), document, depth)])
    yield from _of_limits(schema)
    yield from _of_objects(schema, document, depth)
    yield from _of_arrays(schema, document, depth)
    if any(schema.get(key) not in (None, True, {}) for key in _NO_OPPOSITE):
        yield None
    if is_format(schema.get("format")):
        yield None


def _of_limits(schema: Schema) -> Iterator[Any]:
    for limit, kind, opposite in (
        ("minimum", "Minimum", "Maximum"),
        ("maximum", "Maximum", "Minimum"),
    ):
        exclusive = schema.get(f"exclusive{kind}")
        if limit in schema:
            key = opposite.lower() if exclusive is True else f"exclusive{opposite}"
            yield {"type": "number", key: schema[limit]}
        if isinstance(exclusive, int | float) and not isinstance(exclusive, bool):
            yield {"type": "number", opposite.lower(): exclusive}
    for kind, suffix in (("string", "Length"), ("array", "Items"), ("object", "Properties")):
        least, most = schema.get(f"min{suffix}", 0), schema.get(f"max{suffix}")
        if least > 0:
            yield {"type": kind, f"max{suffix}": int(least) - 1}
        if most is not None:
            exact = kind != "object" or most < 1  # more properties may have equal names
            yield {"type": kind, f"min{suffix}": int(most) + 1} if exact else None


def _of_objects(schema: Schema, document: Document, depth: int) -> Iterator[Any]:
    for name in _list(schema, "required"):
        yield absent(name)
    for name, value in _object(schema, "properties"):
        yield _present(name, negation(value, document, depth))
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        for name, rule in _object(schema, keyword):
            fits = {"required": rule} if isinstance(rule, list) else rule
            yield _all([_present(name, True), negation(fits, document, depth)])


def _of_arrays(schema: Schema, document: Document, depth: int) -> Iterator[Any]:
    first = _list(schema, "prefixItems")
    for index, item in enumerate(first):
        yield element(index, negation(item, document, depth))
    if "items" in schema:
        other = negation(schema["items"], document, depth)
        for index in range(len(first), len(first) + POSITIONS):
            yield element(index, other)
    if "contains" in schema and schema.get("minContains", 1) > 0:
        if schema.get("minContains", 1) > 1:
            yield None
        other = negation(schema["contains"], document, depth)
        yield None if other is None else {"type": "array", "items": other}


def absent(name: str) -> Schema:
    """Objects without a property."""
    return {"type": "object", "properties": {name: False}}


def _present(name: str, value: Any) -> Any:
    if value in (None, False):
        return value
    return {"type": "object", "properties": {name: value}, "required": [name]}


def element(index: int, item: Any) -> Any:
    """Arrays whose element at ``index`` fits a schema."""
    if item in (None, False):
        return item
    return {"type": "array", "prefixItems": [True] * index + [item], "minItems": index + 1}


def _all(parts: Any) -> Any:
    found = [part for part in parts if part is not True]
    if any(part is False for part in found):
        return False
    if any(part is None for part in found):
        return None
    return {"allOf": found} if found else True


def _none_or_two(options: list[Any], document: Document, depth: int) -> Iterator[Any]:
    yield _all(negation(option, document, depth) for option in options)
    for pair in itertools.combinations(options, 2):
        document.work(depth)
        yield _all(pair)


def _types(types: Any) -> set[str]:
    """The types that a list names at least a part of: numbers may be integers."""
    named = {types} if isinstance(types, str) else set(types)
    return {"number" if name == "integer" else name for name in named}


def _other_than(values: list[Any]) -> Any:
    """Values that are not in a list."""
    kinds: dict[str, list[Any]] = {name: [] for name in TYPES}
    for value in values:
        kinds[type_of(value)].append(value)
    free = [name for name in TYPES if not kinds[name] and name != "null"]
    ways: list[Any] = [{"type": [*free, *([] if None in values else ["null"])]}]
    if kinds["boolean"]:
        ways += [{"const": value} for value in (True, False) if value not in kinds["boolean"]]
    if kinds["number"]:
        ways += _other_numbers(sorted(set(kinds["number"])))
    texts = set(kinds["string"])
    if texts and max(map(len, texts)) <= _MOST_CHARACTERS:
        ways.append({"type": "string", "pattern": f"^{_other_text(texts)}$"})
    for kind, others in (("array", _other_array), ("object", _other_object)):
        if kinds[kind]:
            ways.append({"type": kind, "allOf": [{"anyOf": others(x)} for x in kinds[kind]]})
    ways = [way for way in ways if way.get("type") != []]
    return {"anyOf": ways} if ways else False


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "number"


def _other_numbers(values: list[Any]) -> list[Any]:
    ways: list[Any] = [{"type": "number", "exclusiveMaximum": values[0]}]
    for low, high in itertools.pairwise(values):
        ways.append({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high})
    return [*ways, {"type": "number", "exclusiveMinimum": values[-1]}]


def _other_text(texts: set[str]) -> str:
    """A pattern of all texts except these: they leave the tree of their characters somewhere."""
    firsts = sorted({text[0] for text in texts if text})
    plain = "".join(f"\\x{ord(c):02x}" if ord(c) < 128 else c for c in firsts)
    ways = [f"[^{plain}](?s:.)*" if firsts else "(?s:.)+"]
    for char in firsts:
        rests = {text[1:] for text in texts if text.startswith(char)}
        spelled = f"\\x{ord(char):02x}" if ord(char) < 128 else char
        ways.append(spelled + _other_text(rests))
    end = "" if "" in texts else "?"
    return f"(?:{'|'.join(ways)}){end}"


def _other_array(value: list[Any]) -> list[Any]:
    ways: list[Any] = [{"minItems": len(value) + 1}]
    if value:
        ways.append({"maxItems": len(value) - 1})
    for index, item in enumerate(value):
        ways.append(element(index, _other_than([item])))
    return ways


def _other_object(value: Schema) -> list[Any]:
    if not value:
        return [{"minProperties": 1}]
    ways = [absent(name) for name in value]
    return ways + [_present(name, _other_than([item])) for name, item in value.items()]


def _list(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _object(schema: Schema, key: str) -> list[tuple[str, Any]]:
    value = schema.get(key)
    return list(value.items()) if isinstance(value, dict) else []
