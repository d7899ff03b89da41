"""Repetitions of a text's end, against their definition; what a row's lists cost."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from sdk.api.params import SamplingParams
from sdk.sampling.processors import process
from sdk.sampling.repeats import Repeats
from sdk.sampling.resolved import ResolvedParams, resolve
from sdk.sampling.state import SamplerState
from tests.counted import lines_run

texts = st.lists(st.integers(0, 2), max_size=40)


def defined(text: list[int], end: int, breakers: set[int]) -> int:
    """The longest repetition of the end of ``text`` that ends at ``end``, written out."""
    length = 0
    while length <= end and text[end - length] == text[len(text) - 1 - length]:
        if text[end - length] in breakers:
            break
        length += 1
    return length


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(1, 15), max_size=5), st.sets(st.integers(0, 2), max_size=1))
def test_lengths_are_those_of_the_definition_however_the_text_came(text, cuts, breakers) -> None:
    repeats = Repeats(breakers)
    for begin, end in pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]):
        repeats.extend(text[begin:end])
    one_by_one = Repeats(breakers)
    for token in text:
        one_by_one.extend([token])
    expected = [(text[i + 1], defined(text, i, breakers)) for i in range(len(text) - 1)]
    for least in (1, 2, 5):
        for window in (-1, 0, 7):
            first = 0 if window < 0 else max(0, len(text) - window)
            wanted = [
                (token, min(length, place - first + 1))
                for place, (token, length) in enumerate(expected)
                if place >= first and min(length, place - first + 1) >= least
            ]
            for one in (repeats, one_by_one):
                tokens, lengths = one.followed(least, window)
                assert list(zip(tokens.tolist(), lengths.tolist(), strict=True)) == wanted


def test_a_long_repetitive_text_costs_its_length() -> None:
    """8,000 equal tokens: comparing at every place took minutes, n-grams 64 MiB."""
    params = SamplingParams(
        dry_multiplier=1, dry_allowed_length=7000, no_repeat_ngram_size=1024, repetition_penalty=2
    )
    rows: list[torch.Tensor] = []

    def run(length: int) -> None:
        state = SamplerState(params, ResolvedParams(), [3] * length, [])
        for _ in range(5):
            state.append([3])
            rows.append(process(torch.zeros(10), state))

    assert lines_run(lambda: run(8000)) < 3 * lines_run(lambda: run(4000))
    assert all(row[3] == -float("inf") for row in rows[:5])  # 7,000 are allowed


def test_lists_are_made_arrays_once_for_all_answers_and_steps() -> None:
    params = SamplingParams(
        allowed_token_ids=range(2**20 - 2**10, 2**20),
        logit_bias={2**20 - 1 - i: 1.0 for i in range(4096)},
        stop_token_ids=range(4096),
        bad_words=["unused"],
        min_tokens=5,
    )
    resolved = resolve(params, Words(), 2**20)
    states = [SamplerState(params.clone(seed=i), resolved, [1], []) for i in range(64)]
    assert all(state.rules is resolved.rules for state in states)
    shapes = [state.shape() for state in states]
    assert len({id(shape.mask) for shape in shapes}) == 1
    assert len({tuple(map(id, shape.changes)) for shape in shapes}) == 1
    row = process(torch.zeros(2**20), states[0])
    assert int(torch.isfinite(row).sum()) == 2**10 and row[-1] == 1.0


class Words:
    """A tokenizer whose words are numbers."""

    vocab_size = 2**20
    eos_token_ids = frozenset({0})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split() if word.isdecimal()]


def test_many_bad_words_are_looked_up_by_their_beginnings() -> None:
    words = [f"{i % 7} {i % 11} {i}" for i in range(100, 1100)] + ["5"]
    params = SamplingParams(bad_words=words)
    resolved = resolve(params, Words(), 2**20)
    state = SamplerState(params, resolved, [], [9, 3, 4])
    banned = set(torch.isneginf(process(torch.zeros(1200), state)).nonzero()[:, 0].tolist())
    assert banned == {5, *(i for i in range(100, 1100) if (i % 7, i % 11) == (3, 4))}
    assert len(state.rules.completing(np.array([9, 3, 4]))) == 2
