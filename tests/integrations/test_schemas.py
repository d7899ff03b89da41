"""Schemas of frameworks are closed, unless that would change what they mean."""

from __future__ import annotations

from typing import Any

import pytest

from sdk.integrations.schemas import closed

NAME: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}}


def test_objects_have_no_other_keys_wherever_they_are() -> None:
    schema = {
        **NAME,
        "properties": {
            "list": {"type": "array", "items": NAME},
            "one": {"anyOf": [NAME, {"type": "null"}]},
            "ref": {"$ref": "#/$defs/Part"},
        },
        "$defs": {"Part": NAME},
    }
    found = closed(schema)
    assert found["additionalProperties"] is False
    places = found["properties"]["list"]["items"], found["properties"]["one"]["anyOf"][0]
    for place in (*places, found["$defs"]["Part"]):
        assert place == {**NAME, "additionalProperties": False}
    assert "additionalProperties" not in schema  # it is a copy


@pytest.mark.parametrize(
    "schema",
    [
        {**NAME, "additionalProperties": True},
        {**NAME, "patternProperties": {"^x": {}}},
        {"type": "object"},
        {"allOf": [NAME, {"type": "object", "properties": {"age": {"type": "integer"}}}]},
        {"properties": {"a": {"allOf": [NAME, NAME]}}},
        {"type": "string"},
    ],
)
def test_what_says_more_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_one_part_of_an_allof_is_no_reason_to_stay_open() -> None:
    found = closed({"properties": {"a": {"allOf": [{"$ref": "#/$defs/A"}]}}, "$defs": {"A": NAME}})
    assert found["$defs"]["A"]["additionalProperties"] is False
