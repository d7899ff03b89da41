"""The bound on the tokens that complete a text."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from sdk.api.errors import RequestError
from sdk.api.structured_params import StructuredOutputsParams
from sdk.structured.bound import longest_completion, longest_match
from sdk.structured.compiler import GrammarCompiler
from tests.structured.test_schemas_accepted import SUITE

#: Bytes that complete a character.
CHARACTER = 3
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
    assert longest_match(pattern) == (PATTERNS[pattern][0] + CHARACTER, 0)
    schema = {"type": "string", "pattern": pattern}
    without = longest_completion({"type": "string"}, len)
    assert longest_completion(schema, len).tokens == without.tokens + sum(PATTERNS[pattern])


@pytest.mark.parametrize("pattern", ["(", r"\p{L}{3}", "(?=a)b", r"(a)\1", "[[:alpha:]]{7}"])
def test_what_python_reads_differently_has_a_large_bound(pattern: str) -> None:
    assert longest_match(pattern).tokens >= 4 * len(pattern)


@dataclass(frozen=True)
class Piece:
    """A pattern, and where its matches end that begin at some positions of a text.

    Python's ``re`` takes exponential time for repeats of repeats, ``(?:(?:a){1,}){0,}``; sets of
    positions do not.
    """

    pattern: str
    ends: Callable[[str, frozenset[int]], frozenset[int]]


def _one(pattern: str, width: int) -> Piece:
    def ends(text: str, begins: frozenset[int]) -> frozenset[int]:
        found = (begin + width for begin in begins)
        return frozenset(
            end for end in found if re.fullmatch(pattern, text[end - width : end], re.DOTALL)
        )

    return Piece(pattern, ends)


def _then(one: Piece, two: Piece) -> Piece:
    return Piece(
        one.pattern + two.pattern, lambda text, begins: two.ends(text, one.ends(text, begins))
    )


def _either(one: Piece, two: Piece) -> Piece:
    return Piece(
        f"(?:{one.pattern}|{two.pattern})",
        lambda text, begins: one.ends(text, begins) | two.ends(text, begins),
    )


def _repeated(one: Piece, least: int) -> Piece:
    def ends(text: str, begins: frozenset[int]) -> frozenset[int]:
        for _ in range(least):
            begins = one.ends(text, begins)
        while not (further := one.ends(text, begins)) <= begins:
            begins |= further
        return begins

    return Piece(f"(?:{one.pattern}){{{least},}}", ends)


def _optional(one: Piece) -> Piece:
    return Piece(f"(?:{one.pattern})?", lambda text, begins: begins | one.ends(text, begins))


PIECES = st.recursive(
    st.sampled_from([_one("a", 1), _one("bc", 2), _one("[0-9]", 1), _one(r"\d", 1), _one(".", 1)]),
    lambda inner: st.one_of(
        st.builds(_then, inner, inner),
        st.builds(_either, inner, inner),
        st.builds(_repeated, inner, st.integers(0, 3)),
        st.builds(_optional, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(PIECES, st.data())
def test_every_beginning_of_a_match_is_completed_within_the_bound(
    piece: Piece, data: st.DataObject
) -> None:
    """A beginning of a match, completed with the shortest texts of a few characters."""
    whole = data.draw(st.from_regex(piece.pattern, fullmatch=True).filter(str.isascii))
    assert len(whole) in piece.ends(whole, frozenset({0}))
    begun = whole[: data.draw(st.integers(0, len(whole)))]
    bound = longest_match(piece.pattern).tokens - CHARACTER
    rests = [""]
    for _ in range(min(bound, 5) + 1):
        if any(len(begun + rest) in piece.ends(begun + rest, frozenset({0})) for rest in rests):
            return
        rests = [rest + char for rest in rests for char in "abc0"]
    assert bound > 5


def test_a_format_counts_its_own_length() -> None:
    """A date has ten characters; its pattern has repeats of alternatives in alternatives."""
    day = {"type": "string", "pattern": "^(?:[1-9][0-9]{3}|0[1-9][0-9]{2})-(?:0[1-9]|1[0-2])$"}
    schema = {"type": "object", "properties": {"day": day}, "required": ["day"]}
    assert longest_completion(schema, len).tokens < 100


def test_a_part_may_require_what_another_one_describes() -> None:
    """As the rewriting of ``if`` and ``contains`` has it."""
    long = {"type": "string", "minLength": 1000}
    objects = {
        "properties": {"a": long, "b": long, "c": {"type": "object", "properties": {"d": long}}},
        "allOf": [{"required": ["a", "b"]}, {"properties": {"c": {"required": ["d"]}}}],
    }
    assert longest_completion(objects, len).tokens > 3000
    arrays = {"items": long, "anyOf": [{"minItems": 3}, {"maxItems": 0}]}
    assert longest_completion(arrays, len).tokens > 3000
    apart = {"properties": {"a": long, "b": {"required": ["a"], "properties": {"a": {}}}}}
    assert longest_completion(apart, len).tokens < 1100


def test_brackets_count_only_where_any_json_or_the_schema_itself_may_be_inside() -> None:
    closed = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "null"}}}}
    assert longest_completion({**closed, "additionalProperties": False}, len).per_bracket == 0
    assert longest_completion(closed, len).per_bracket > 0, "another property may be anything"
    assert longest_completion({"enum": [[1], {}]}, len).per_bracket == 0
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert longest_completion(tree, len).per_bracket > 0


def test_a_form_is_not_counted_once_for_each_of_its_brackets() -> None:
    form = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in "abcdefgh"},
        "required": list("abcdefgh"),
        "additionalProperties": False,
    }
    bound = longest_completion({"type": "array", "items": form, "minItems": 2}, len)
    assert bound.after(3) < 350  # two forms take 200


@pytest.mark.slow
def test_texts_of_the_suite_are_completed_within_the_bound(compiler: GrammarCompiler) -> None:
    """Beginnings of valid examples of each schema, spelled in two ways."""
    chosen, compared = random.Random(1), 0
    for groups in json.loads(SUITE.read_text()).values():
        for group in groups:
            valid = [value for _, value, valid in group["tests"] if valid]
            if not valid or not isinstance(group["schema"], dict):
                continue
            try:
                grammar = compiler.compile(StructuredOutputsParams(json=group["schema"]))
            except RequestError:
                continue
            text = json.dumps(chosen.choice(valid), ensure_ascii=False)
            pieces = chosen.choice([[text], list(text)])
            tokens = [token for piece in pieces for token in grammar.tokens.encode(piece)]
            matcher = grammar.matcher.copy()
            begun = tokens[: chosen.randint(0, matcher.allowed(tokens))]
            matcher.consume(begun)
            way = None if matcher.stopped else grammar.tokens.search().shortest(matcher, 400)
            if way is not None and grammar.bound.tokens:
                opened = sum(int(grammar.tokens.shapes.opens[token]) for token in begun)
                assert len(way) <= grammar.bound.after(opened), (group["schema"], text, len(begun))
                compared += 1
    assert compared > 250
