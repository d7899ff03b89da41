"""The suffix automaton, compared with a search of the whole text."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given, strategies as st

from sdk.engine.scheduling.suffix_automaton import SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def occurs_at(text: list[int], part: list[int]) -> set[int]:
    """The positions after the occurrences of ``part``."""
    count = len(part)
    return {end for end in range(count, len(text) + 1) if text[end - count : end] == part}


def longest_suffix(text: list[int], other: list[int]) -> int:
    """The length of the longest suffix of ``text`` that occurs in ``other``."""
    return next(n for n in range(len(text), -1, -1) if occurs_at(other, text[len(text) - n :]))


@given(TEXTS)
def test_the_match_is_the_longest_suffix_that_occurred_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for count, token in enumerate(text, 1):
        automaton.append(token)
        known = text[:count]
        length, end = automaton.match
        assert length == longest_suffix(known, known[:-1]), known
        if length:
            assert end in occurs_at(known[:-1], known[count - length :])
    assert automaton.tokens == text
    assert automaton.num_states <= max(2 * len(text), 1)


@given(TEXTS, st.integers(1, 5))
def test_a_limited_match_is_one_of_the_last_tokens(text: list[int], most: int) -> None:
    automaton = SuffixAutomaton(most)
    for count, token in enumerate(text, 1):
        automaton.append(token)
        known = text[:count]
        length, end = automaton.match
        assert length == min(longest_suffix(known, known[:-1]), most)
        if length:
            assert end in occurs_at(known[:-1], known[count - length :])


@given(TEXTS, TEXTS, TEXTS)
def test_another_text_is_followed_while_the_automaton_grows(
    text: list[int], other: list[int], more: list[int]
) -> None:
    """A match that began before ``more`` was added stays one, though states were split."""
    automaton = SuffixAutomaton()
    for token in text:
        automaton.append(token)
    state, length, half = 0, 0, len(other) // 2
    for count, token in enumerate(other, 1):
        if count == half:
            for later in more:
                automaton.append(later)
        before = length
        state, length = automaton.follow(state, length, token)
        known = other[:count]
        if length:
            assert automaton.end_of(state, length) in occurs_at(
                automaton.tokens, known[count - length :]
            )
        best = longest_suffix(known, automaton.tokens)
        assert length == min(best, before + 1) or count >= half  # later text may match more
        assert length <= best


def test_a_recent_occurrence_is_preferred() -> None:
    automaton = SuffixAutomaton()
    for token in [1, 2, 7, 1, 2, 8, 1, 2]:
        automaton.append(token)
    assert automaton.match == (2, 5)  # 8 follows, not 7


def test_the_memory_of_a_state_is_what_is_counted() -> None:
    """Text with the statistics of English, and text in which nothing repeats."""
    draws = np.random.default_rng(0)
    for tokens in (draws.zipf(1.3, 4000) % 5000, draws.permutation(4000)):
        text = [int(token) for token in tokens]
        tracemalloc.start()
        automaton = SuffixAutomaton()
        for token in text:
            automaton.append(token)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken <= 1.05 * automaton.num_states * SuffixAutomaton.STATE_BYTES
