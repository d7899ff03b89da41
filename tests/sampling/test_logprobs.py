"""Log-probabilities of a position: a dict to who reads them, arrays to who keeps them."""

from __future__ import annotations

import copy
import math
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdk.api.logprobs import Logprob, Logprobs
from sdk.sampling.logprobs import scored
from sdk.sampling.rows import Scratch
from sdk.text.token_texts import TokenTexts

WORDS = 49_152


class Words:
    """A tokenizer that counts what it decodes."""

    def __init__(self) -> None:
        self.decoded = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.decoded += 1
        return f"<{ids[0]}>"


def row(seed: int, size: int = WORDS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * 4


def expected(logits: np.ndarray, token: int, count: int, also: list[int]) -> dict[int, Logprob]:
    """What the entries are, one after the other."""
    best = logits.max()
    offset = float(best) + math.log(np.exp(logits - best).sum(dtype=np.float64))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranks = {token_id: rank for rank, token_id in enumerate(order, start=1)}
    chosen = order if count == -1 else order[:count]
    more = sorted(set(also) - set(chosen), key=ranks.__getitem__)
    rows = dict.fromkeys([*chosen, *more, token])
    return {i: Logprob(float(logits[i]) - offset, ranks[i], f"<{i}>") for i in rows}


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.integers(1, 60),
    ties=st.booleans(),
    count=st.integers(-1, 70),
    also=st.lists(st.integers(0, 59), max_size=40),
)
def test_entries_are_those_of_the_definition_to_the_last_bit(
    seed: int, size: int, ties: bool, count: int, also: list[int]
) -> None:
    logits = row(seed, size)
    if ties:
        logits = np.round(logits / 4).astype(np.float32) * np.float32(-1)  # -0.0 among them
    also, token = [i % size for i in also], seed % size
    sampled = scored(logits, token, count, Scratch(size), np.unique(np.array(also, np.int64)))
    wanted = expected(logits, token, count, also)
    entries = sampled.top.with_texts(TokenTexts(Words()))
    assert list(entries.items()) == list(wanted.items())
    assert {i: entries[i] for i in wanted} == wanted
    assert (sampled.logprob, sampled.rank) == (wanted[token].logprob, wanted[token].rank)


@pytest.fixture(params=["whole vocabulary", "the best"])
def entries(request: pytest.FixtureRequest) -> Logprobs:
    count = -1 if request.param == "whole vocabulary" else 5
    return scored(row(1, 30), 3, count, Scratch(30)).top.with_texts(TokenTexts(Words()))


def test_they_behave_as_the_dict_of_the_same_entries(entries: Logprobs) -> None:
    plain = dict(entries.items())
    assert len(entries) == len(plain) and list(entries) == list(plain)
    assert list(entries.keys()) == list(plain) and list(entries.values()) == list(plain.values())
    assert entries == plain and plain == entries and entries == copy.deepcopy(entries)
    assert entries != {} and entries != dict(list(plain.items())[1:]) and entries != 5
    assert dict(entries) == plain and {**entries} == plain
    first = next(iter(plain))
    assert entries[first] == plain[first] and entries[np.int64(first)] == plain[first]
    assert first in entries and 30 not in entries and "3" not in entries and -1 not in entries
    assert entries.get(30) is None and entries.get(30, 7) == 7
    with pytest.raises(KeyError, match="30"):
        entries[30]
    with pytest.raises(TypeError, match="unhashable"):
        hash(entries)
    best = next(iter(entries.values()))
    assert best.rank == 1 and best.decoded_token == f"<{first}>"


def test_what_is_printed_is_short(entries: Logprobs) -> None:
    assert repr(entries).startswith("Logprobs({") and f"{len(entries) - 3} more" in repr(entries)
    assert len(repr(scored(row(1), 3, -1, Scratch(WORDS)).top)) < 400


def test_a_pickle_has_the_texts_and_no_tokenizer(entries: Logprobs) -> None:
    words = Words()
    words.lock = lambda: None  # as a real one has: cannot be pickled
    again = pickle.loads(pickle.dumps(entries.with_texts(TokenTexts(words))))
    assert again == entries and pickle.loads(pickle.dumps(again)) == entries


def test_pickled_rows_of_a_whole_vocabulary_share_their_texts() -> None:
    texts, scratch = TokenTexts(Words()), Scratch(WORDS)
    rows = [scored(row(i), 3, -1, scratch).top.with_texts(texts) for i in range(8)]
    size = len(pickle.dumps(rows))
    assert size < 8 * 4 * WORDS + 16 * WORDS
    again = pickle.loads(pickle.dumps(rows))
    assert again[7] == rows[7]


def test_a_scored_position_makes_a_few_objects_and_decodes_nothing() -> None:
    words, logits, scratch = Words(), row(2), Scratch(WORDS)
    texts = TokenTexts(words)
    rows = []
    for count, also in ((-1, ()), (1024, ()), (5, range(4096))):
        also_ids = np.unique(np.array(list(also), np.int64))
        before = sys.getallocatedblocks()
        rows.append(scored(logits, 3, count, scratch, also_ids).top.with_texts(texts))
        assert sys.getallocatedblocks() - before < 200  # one object per entry was 5 to 49,152
    assert len(rows[0]) == WORDS and len(rows[1]) in (1024, 1025) and len(rows[2]) >= 4096
    assert rows[0].nbytes == 4 * WORDS and rows[1].nbytes <= 12 * 1025
    assert words.decoded == 0
    assert rows[0][7].decoded_token == "<7>" and words.decoded == 1
