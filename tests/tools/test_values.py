"""Values of arguments that are not written as JSON, by their schema."""

from __future__ import annotations

from typing import Any

import pytest

from sdk.tools.values import from_text, inner_schema, parameter_schema, to_schema, types_of

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
LOOP = {"$ref": "#/$defs/Loop", "$defs": {"Loop": {"$ref": "#/$defs/Loop"}}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, None, True]}, {"string", "integer", "null", "boolean"}),
        ({"enum": [1.5, [], {}]}, {"number", "array", "object"}),
        ({"const": 3}, {"integer"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{}, {"type": "number"}]}, {"number"}),
        ({"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, {"object"}),
        ({"$ref": "#/$defs/Missing"}, None),
        (LOOP, None),
        ({}, None),
        ({"enum": 3}, None),
    ],
)
def test_the_types_of_a_schema(schema: dict[str, Any], types: set[str] | None) -> None:
    assert types_of(schema) == types


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"),
        (" 3 ", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("3", {"type": "number"}, 3),
        ("-.5e1", {"type": "number"}, -5.0),
        ("1e999", {"type": "number"}, "1e999"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("9" * 200_000 + "x", {"type": "number"}, "9" * 200_000 + "x"),
        ("True", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("null", {"type": "string"}, "null"),
        ("true", {"enum": ["true", False]}, "true"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("text", {"type": "array"}, "text"),
        ("['a', \"b\", True, None]", {"type": "array"}, ["a", "b", True, None]),
        ("(1, 2)", {"type": "array"}, [1, 2]),
        ("(1,)", {"type": "array"}, [1]),
        ("{1, 2, 1}", {"type": "array"}, [1, 2]),
        ("{}", {"type": "array"}, []),
        ("{'a': (1, None), \"b\": False}", {"type": "object"}, {"a": [1, None], "b": False}),
        ("['1', 2]", {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ("[1, 'x'] + y", {"type": "array"}, "[1, 'x'] + y"),
        ("__import__('os')", {"type": "array"}, "__import__('os')"),
        ("'3'", {"type": "integer"}, 3),
        ('"True"', {"type": "boolean"}, True),
        ("'x'", {"type": "string"}, "'x'"),
        ("0x1F", {"type": "integer"}, 31),
        ("0b2", {"type": "integer"}, "0b2"),
        ("None", {"anyOf": [{"type": "array"}, {"type": "null"}]}, None),
        ("[1]", {}, [1]),
        ("3", {}, 3),
        ('"quoted"', {}, '"quoted"'),
        ("text", {}, "text"),
        ("[" * 200_000, {}, "[" * 200_000),
    ],
)
def test_text_becomes_a_value(text: str, schema: dict[str, Any], value: object) -> None:
    found = from_text(text, schema)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("written", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("true", {"type": "boolean"}, True),
        ("3", {"type": ["integer", "string"]}, "3"),
        (90210, {"type": "string"}, "90210"),
        (True, {"type": "string"}, True),
        (3, {}, 3),
        ([1], {"type": "string"}, [1]),
        (["1", "x"], {"type": "array", "items": {"type": "integer"}}, [1, "x"]),
        (
            [1, "2"],
            {"prefixItems": [{"type": "string"}, {"type": "integer"}], "type": "array"},
            ["1", 2],
        ),
        (
            {"a": "1", "b": 2},
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            {"a": 1, "b": 2},
        ),
        ({"k": "1"}, {"type": "object", "additionalProperties": {"type": "number"}}, {"k": 1}),
        (
            [["true"]],
            {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}},
            [[True]],
        ),
        (
            ["1"],
            {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]},
            [1],
        ),
        (
            ["1"],
            {"$ref": "#/$defs/L", "$defs": {"L": {"type": "array", "items": {"type": "integer"}}}},
            [1],
        ),
        ({}, {"type": "array"}, []),
        (3.0, {"type": "integer"}, 3),
        (3.0, {"type": "number"}, 3.0),
        ("[1, 'a']", {"type": "array"}, [1, "a"]),
    ],
)
def test_a_written_value_gets_the_type_of_the_schema(
    written: object, schema: dict[str, Any], value: object
) -> None:
    found = to_schema(written, schema)
    assert found == value and type(found) is type(value)


def test_parts_of_a_schema_keep_its_definitions() -> None:
    whole = {"properties": {"a": {"$ref": "#/$defs/Node"}, "b": {"type": "array", "items": NODE}}}
    whole["$defs"] = {"Node": NODE}
    assert parameter_schema(whole, "a") == {**NODE, "$defs": {"Node": NODE}}
    assert parameter_schema(whole, "missing") == parameter_schema({}, "a") == {}
    assert inner_schema(whole, True) == {}
    assert inner_schema(LOOP, LOOP)["$ref"] == "#/$defs/Loop"
