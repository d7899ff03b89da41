"""Keys that a schema does not list can be forbidden: for a call, and for all of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from tests.structured.byte_matcher import allows, matcher_of

INTEGER = {"type": "integer"}
A = {"type": "object", "properties": {"a": INTEGER}}
B = {"type": "object", "properties": {"b": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        (A, [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
        ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "c": 1}]),
        ({"$ref": "#/$defs/A", "properties": {"c": INTEGER}}, [{"c": 1, "a": 1}], [{"b": 1}]),
        ({"$ref": "#/$defs/A", "description": "x"}, [{"a": 1}], [{"b": 1}]),
        ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"c": 1}]),
        ({**A, "anyOf": [{"required": ["a"]}, B]}, [{"a": 1}], [{"c": 1}]),
        ({"type": "array", "items": A}, [[{"a": 1}]], [[{"b": 1}]]),
        ({**A, "additionalProperties": INTEGER}, [{"a": 1, "b": 1}], []),
        ({"type": "object"}, [{"x": 1}], []),  # lists nothing
        ({"allOf": [{"$ref": "#/$defs/A"}, B]}, [{"a": 1, "b": 2}], [{"c": 1}]),
        ({"properties": {"x": {"$ref": "#/$defs/A"}}}, [{"x": {"a": 1}}], [{"x": {"b": 1}}]),
    ],
)
def test_only_listed_keys(schema: dict[str, Any], allowed: list[Any], forbidden: list[Any]) -> None:
    schema = {**schema, "$defs": {"A": A}}
    closed = matcher_of(json=schema, disable_additional_properties=True)
    assert [one for one in allowed if not allows(closed, one)] == []
    assert [one for one in forbidden if allows(closed, one)] == []
    free = matcher_of(json=schema)
    assert [one for one in allowed if not allows(free, one)] == []


def test_an_option_of_the_engine(golden: Path) -> None:
    path = golden / "gguf-Q8_0" / "model.gguf"
    options = {"max_model_len": 256, "disable_additional_properties": True}
    with LLM(path, **options) as llm:
        params = [
            SamplingParams(
                max_tokens=60, temperature=5.0, seed=seed, structured_outputs={"json": A}
            )
            for seed in range(6)
        ]
        outputs = llm.generate(["the cat"] * 6, params, use_tqdm=False)
        closed = matcher_of(json=A, disable_additional_properties=True)
        assert all(allows(closed, one.outputs[0].text) for one in outputs)
        fork = llm.fork(disable_additional_properties=False)
        with fork:
            found = fork.generate(["the cat"] * 6, params, use_tqdm=False)
            assert not all(allows(closed, one.outputs[0].text) for one in found)
