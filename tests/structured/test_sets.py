"""Sets: different items, by the grammar or by a check, never fewer without a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from sdk import LLM, SamplingParams
from sdk.api.schemas import load, schema_of
from tests.structured.byte_matcher import accepts, matcher_of

Color = Literal["red", "green", "blue"]


class Paint(BaseModel):
    colors: set[Color]
    words: frozenset[str] = frozenset()
    more: list[set[int]] = []


@dataclass
class Plain:
    colors: set[Color]
    words: set[str]


@pytest.mark.parametrize("kind", [set[Color], frozenset[Color]])
def test_a_set_of_few_values_is_constrained(kind: Any) -> None:
    matcher = matcher_of(json=kind)
    assert accepts(matcher, '["red", "blue"]') and accepts(matcher, '["blue", "red"]')
    assert not accepts(matcher, '["red", "red"]')
    many = matcher_of(json=set[Literal[1, 2, 3, 4, 5, 6, 7, 8]])
    assert accepts(many, "[1, 2, 3, 4, 5, 6, 7, 8]") and not accepts(many, "[1, 1]")
    assert accepts(matcher_of(json=set[bool]), "[true, false]")


def test_other_sets_are_accepted_and_checked() -> None:
    for kind in (set[str], set[Literal[1, 2, 3, 4, 5, 6, 7, 8, 9]], set[tuple[int, int]]):
        assert "uniqueItems" not in schema_of(kind)
    assert load(set[str], ["a", "b"]) == {"a", "b"}
    assert load(set[int], [1, 2]) == {1, 2}
    with pytest.raises(ValueError, match="a set has the item 'a' twice; use a list"):
        load(set[str], ["a", "b", "a"])
    with pytest.raises(ValueError, match="a set has the item 'a' twice"):
        load(Plain, {"colors": [], "words": ["a", "a"]})


def test_sets_of_pydantic_models() -> None:
    matcher = matcher_of(json=Paint)
    assert accepts(matcher, '{"colors": ["red"], "words": ["a"], "more": [[1], [2]]}')
    assert not accepts(matcher, '{"colors": ["red", "red"]}')
    assert load(Paint, {"colors": ["red"], "more": [[1], [1]]}).more == [{1}, {1}]
    for value in ({"colors": ["red"], "words": ["a", "a"]}, {"colors": [], "more": [[1, 1]]}):
        with pytest.raises(ValueError, match=r"a set has the item .* twice"):
            load(Paint, value)


def test_a_typed_result_says_that_an_item_is_there_twice(tiny: LLM) -> None:
    twice = SamplingParams(max_tokens=60, temperature=0)
    [output] = tiny.generate(["the cat"], twice, returns=set[Color], use_tqdm=False)
    assert output.parsed <= {"red", "green", "blue"}
