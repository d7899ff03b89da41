"""Stop strings and patterns, however the text is cut into tokens."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given, settings, strategies as st

from sdk.api.errors import RequestError
from sdk.api.stop_regex import MAX_HELD, MAX_PATTERN_LEN, StopRegex
from sdk.text.stops import MAX_PATTERNS, MAX_STOP_LEN, MAX_STOPS, StopMatcher, StopStrings
from tests.counted import lines_run


def run(
    stops: StopStrings, chunks: list[str], include: bool = False
) -> tuple[str, str | None, int]:
    """Text shown, stop found, characters dropped."""
    matcher = StopMatcher(stops, include)
    shown = ""
    for chunk in chunks:
        update = matcher.push(chunk)
        shown += update.text
        if update.stop is not None:
            return shown, update.stop, update.dropped
    return shown + matcher.finish(), None, 0


def cut(text: str, sizes: list[int]) -> list[str]:
    chunks = []
    for size in sizes:
        chunks.append(text[:size])
        text = text[size:]
    return [*chunks, text]


CUTS = st.lists(st.integers(0, 4), max_size=15)


@settings(max_examples=500, deadline=None)
@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("abc", max_size=25),
    sizes=CUTS,
    include=st.booleans(),
)
def test_the_stop_that_ends_first_wins(
    stop: list[str], text: str, sizes: list[int], include: bool
) -> None:
    expected: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        if ending := [s for s in stop if text[:end].endswith(s)]:
            found = max(ending, key=len)
            expected = (text[: end if include else end - len(found)], found)
            break
    shown, found_stop, _ = run(StopStrings(stop), cut(text, sizes), include)
    assert (shown, found_stop) == expected


PATTERNS = [
    "a+b", "(a|b)+c", "[^a]a", "ab{1,3}c", "(?:ab)*?c", "a.b", "(?s)a.b", "(?i)AB", r"\s\w", "^ab",
    "(?m)^b", "(a+)+b", "[a-b]c?a", r"\d|c\S", r"[^\s\d]b", "(?i)[^A]b", r"(?a)\w ", "a{2}",
    "(|a)b",
]  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(pattern=st.sampled_from(PATTERNS), text=st.text("abcB1 \né", max_size=14), sizes=CUTS)
def test_patterns_mean_what_they_mean_to_python(pattern: str, text: str, sizes: list[int]) -> None:
    compiled = re.compile(pattern)
    expected: tuple[str, str | None] = (text, None)
    for end in range(1, len(text) + 1):
        starts = [start for start in range(end) if compiled.fullmatch(text, start, end)]
        if starts:
            expected = (text[: starts[0]], pattern)
            break
    shown, found, _ = run(StopStrings([], [pattern]), cut(text, sizes))
    assert (shown, found) == expected


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(StopStrings(["<|end|>", "\n\nUser"]))
    assert matcher.push("Hello <").text == "Hello "
    assert matcher.push("|en").text == ""
    assert matcher.push("d of it\n").text == "<|end of it"
    assert matcher.push("x").text == "\nx"
    assert matcher.finish() == ""


def test_a_stop_says_how_much_text_is_dropped() -> None:
    assert run(StopStrings(["END"]), ["ab EN", "D and more"]) == ("ab ", "END", 12)
    assert run(StopStrings(["END"]), ["ab EN", "D and more"], include=True) == ("ab END", "END", 9)


def test_stops_before_min_tokens_are_passed_over() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    shown = matcher.push("xab", can_stop=False).text
    shown += matcher.push("ya", can_stop=False).text
    assert shown == "xaby"
    assert matcher.push("b").stop == "ab"


def test_the_longest_of_stops_that_end_together_is_named() -> None:
    assert run(StopStrings(["b", "ab"]), ["xab"]) == ("x", "ab", 2)
    assert run(StopStrings(["b"], ["[a-z]+b"]), ["xab"]) == ("", "[a-z]+b", 3)


def test_without_stops_text_passes_through() -> None:
    assert not StopStrings()
    assert run(StopStrings(), ["a", "b"]) == ("ab", None, 0)


def test_a_match_that_never_ends_holds_back_a_bounded_text() -> None:
    matcher = StopMatcher(StopStrings([], ["a[^z]*z"]))
    shown = matcher.push("a" * 2500).text
    assert len(shown) >= 2500 - MAX_HELD - 1
    assert matcher.push("z").stop == "a[^z]*z"


def test_a_pattern_that_takes_re_forever_is_read_in_one_pass() -> None:
    matcher = StopMatcher(StopStrings([], ["(a+)+b", "(a|a)*c", "(a*)*(a*)*d"]))
    assert matcher.push("a" * 2000).stop is None
    assert len(StopRegex("(a+)+b")._tests) < 10


def test_a_character_costs_the_places_of_a_pattern_and_not_their_square() -> None:
    """A pattern four times as long costs less than eight times as much."""

    def read(places: int) -> None:
        matcher = StopMatcher(StopStrings([], [f"(?:.?){{{places}}}\x00"]))
        for seed in range(50):
            matcher.push("abcdefghij"[seed % 7 :])

    assert lines_run(lambda: read(200)) < 8 * lines_run(lambda: read(50))


def test_what_is_remembered_of_a_pattern_is_bounded() -> None:
    stops = StopStrings([], ["(?s).*a.{200}\x00"])
    matcher = StopMatcher(stops)
    draw = random.Random(1)
    for _ in range(300):
        matcher.push("".join(draw.choice("ab" + chr(200 + draw.randrange(5000))) for _ in "1234"))
    pattern = stops.patterns[0]
    seen, stack = {id(pattern.root)}, [pattern.root, *pattern._nodes.values()]
    while stack:
        for step in stack.pop().steps.values():
            if id(step.node) not in seen:
                seen.add(id(step.node))
                stack.append(step.node)
    assert len(seen) < 5000 and len(pattern._reading) <= 5000


@pytest.mark.parametrize(
    ("stop", "stop_regex", "words"),
    [
        (["a"] * (MAX_STOPS + 1), [], ["stop", str(MAX_STOPS), str(MAX_STOPS + 1)]),
        ([""], [], ["stop", "found 0"]),
        (["a" * (MAX_STOP_LEN + 1)], [], ["stop", str(MAX_STOP_LEN + 1)]),
        ([5], [], ["stop", "found int"]),
        ("END", [], ["stop", "a list"]),
        ([], "END", ["stop_regex", "a list"]),
        ([], ["a"] * (MAX_PATTERNS + 1), ["stop_regex", str(MAX_PATTERNS)]),
        ([], ["a" * (MAX_PATTERN_LEN + 1)], ["stop_regex", str(MAX_PATTERN_LEN + 1)]),
        ([], [5], ["stop_regex", "found int"]),
        ([], ["(a"], ["not a regular expression", "unterminated"]),
        ([], ["a*"], ["empty text"]),
        ([], ["^"], ["empty text"]),
        ([], ["(a+)+$"], ["anchors"]),
        ([], [r"\bfoo"], ["anchors"]),
        ([], ["(?=a)b"], ["look-ahead"]),
        ([], ["(?<!a)b"], ["look-behind"]),
        ([], [r"(a)\1"], ["back-references"]),
        ([], ["(a)(?(1)b|c)"], ["conditional"]),
        ([], ["(?i:a)b"], ["flags inside"]),
        ([], ["a{2000}"], ["states"]),
        ([], ["[ab]{257}"], ["at most 256 places", "found 257"]),
        ([], ["(?:.?){500}"], ["places"]),
        ([], ["(a{1,99}){99}"], ["states"]),
        ([], ["(((){999}){999}){999}a"], ["states"]),
    ],
)
def test_bad_stops_are_refused(stop: list[str], stop_regex: list[str], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        StopStrings(stop, stop_regex)
    for word in words:
        assert word in str(caught.value)
