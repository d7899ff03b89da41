"""The value of JSON text that is not complete yet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from sdk.structured.partial_json import partial_value

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("  ", None),
        ("{", {}),
        ('{"', {}),
        ('{"na', {}),
        ('{"name"', {}),
        ('{"name":', {}),
        ('{"name": "', {"name": ""}),
        ('{"name": "Bo', {"name": "Bo"}),
        ('{"name": "Bo\\', {"name": "Bo"}),
        ('{"name": "Bo\\\\', {"name": "Bo\\"}),
        ('{"name": "Bo\\u00', {"name": "Bo"}),
        ('{"name": "\\ud83d\\ude', {"name": ""}),
        ('{"name": "Bo"', {"name": "Bo"}),
        ('{"name": "Bo", "age"', {"name": "Bo"}),
        ('{"name": "Bo", "age": 4', {"name": "Bo"}),
        ('{"name": "Bo", "age": 42,', {"name": "Bo", "age": 42}),
        ('{"a": tr', {}),
        ('{"a": true}', {"a": True}),
        ('[1, 2, {"a": [3, "x', [1, 2, {"a": [3, "x"]}]),
        ("[1, 2", [1]),
        ('"a, b: {c', "a, b: {c"),
        ("12", None),
    ],
)
def test_what_is_certain_so_far(text: str, value: Any) -> None:
    assert partial_value(text) == value


def test_a_number_counts_when_the_answer_has_ended() -> None:
    assert partial_value("12", ended=True) == 12
    assert partial_value("[1, 2", ended=True) == [1]


def _is_prefix(part: Any, whole: Any) -> bool:
    """Whether ``part`` may grow into ``whole``."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and _is_prefix(one, whole[key]) for key, one in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(_is_prefix, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    return bool(part == whole)


@given(JSON, st.booleans(), st.booleans())
def test_every_beginning_of_a_text_has_a_value_that_grows(
    value: Any, ascii_only: bool, spread: bool
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=2 if spread else None)
    for end in range(len(text)):
        part = partial_value(text[:end])
        assert part is None or _is_prefix(part, value), (text[:end], part)
    assert partial_value(text, ended=True) == value
