"""The bound on the tokens that complete a text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st

from sdk.structured.bound import longest_completion, longest_match

#: Pattern -> the longest rest of a match, and the shortest match.
PATTERNS = {
    "": (0, 0),
    "abc": (3, 3),
    "^[0-9]{5}$": (5, 5),
    r"[a-c]{2,6}-\d{3}": (6, 6),
    "abc|d{100}e": (101, 3),
    "(a|b{3}){2,}x": (5, 3),
    "([A-Z][a-z]{2,9} ){40,400}": (160, 160),
    "(?:x?){3,}": (1, 0),
    "[^a-z]": (1, 1),
    "[^ -~]": (6, 6),
    '"': (6, 6),
    r"[\x00-\x1f]": (6, 6),
    "ä+": (6, 6),
    r"\s\S\w\W": (4, 4),
    ".*": (1, 0),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns(pattern: str) -> None:
    assert longest_match(pattern) == sum(PATTERNS[pattern])


@pytest.mark.parametrize("pattern", ["(", r"\p{L}{3}", "(?=a)b", r"(a)\1", "[[:alpha:]]{7}"])
def test_what_python_reads_differently_has_a_large_bound(pattern: str) -> None:
    assert longest_match(pattern) >= 4 * len(pattern)


PIECES = st.recursive(
    st.sampled_from(["a", "bc", "[0-9]", r"\d", "."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.integers(0, 3)).map(lambda two: f"(?:{two[0]}){{{two[1]},}}"),
        inner.map(lambda one: f"(?:{one})?"),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.data())
def test_every_beginning_of_a_match_is_completed_within_the_bound(
    pattern: str, data: st.DataObject
) -> None:
    """A beginning of a match, completed with the shortest texts of a few characters."""
    whole = data.draw(st.from_regex(pattern, fullmatch=True).filter(str.isascii))
    begun = whole[: data.draw(st.integers(0, len(whole)))]
    bound = longest_match(pattern)
    rests = [""]
    for _ in range(min(bound, 5) + 1):
        if any(re.fullmatch(pattern, begun + rest, re.DOTALL) for rest in rests):
            return
        rests = [rest + char for rest in rests for char in "abc0"]
    assert bound > 5


def test_a_format_counts_its_own_length() -> None:
    """A date has ten characters; its pattern has repeats of alternatives in alternatives."""
    day = {"type": "string", "pattern": "^(?:[1-9][0-9]{3}|0[1-9][0-9]{2})-(?:0[1-9]|1[0-2])$"}
    schema = {"type": "object", "properties": {"day": day}, "required": ["day"]}
    assert longest_completion(schema, len) < 100


def test_a_part_may_require_what_another_one_describes() -> None:
    """As the rewriting of ``if`` and ``contains`` has it."""
    long = {"type": "string", "minLength": 1000}
    objects = {
        "properties": {"a": long, "b": long, "c": {"type": "object", "properties": {"d": long}}},
        "allOf": [{"required": ["a", "b"]}, {"properties": {"c": {"required": ["d"]}}}],
    }
    assert longest_completion(objects, len) > 3000
    arrays = {"items": long, "anyOf": [{"minItems": 3}, {"maxItems": 0}]}
    assert longest_completion(arrays, len) > 3000
    apart = {"properties": {"a": long, "b": {"required": ["a"], "properties": {"a": {}}}}}
    assert longest_completion(apart, len) < 1100
