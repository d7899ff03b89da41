"""Banned strings, however the text is cut into tokens: what is taken back, and what is certain."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models

from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.text.automaton import StringAutomaton
from sdk.text.banned import BannedMatcher
from sdk.text.detokenizer import IncrementalDetokenizer
from sdk.text.stops import StopMatcher, StopStrings

#: Tokens as bytes: parts of characters, several characters, both.
PIECES = [b"a", b"b", b"ab", b"ba", b"aab", b"", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xff"]
WORDS = ["a", "##a", "##b", "b", "ab", "##ab", "."]
BANNED = st.lists(st.text("ab\u00e9\ufffd", min_size=1, max_size=5), min_size=1, max_size=4)


def bytewise() -> Any:
    return SimpleNamespace(
        bytewise=True,
        special_ids=frozenset(),
        strips_leading_space=False,
        id_to_bytes=PIECES.__getitem__,
    )


def wordpiece() -> Any:
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="."))
    backend.decoder = decoders.WordPiece(cleanup=True)
    return JsonTokenizer(backend, TokenizerFacts(), "test")


TOKENIZERS = {"bytes": (bytewise(), len(PIECES)), "words": (wordpiece(), len(WORDS))}


def text_of(tokenizer: Any, ids: Sequence[int], *, ended: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(map(detokenizer.push, ids))
    return text + detokenizer.finish() if ended else text


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_stays_never_has_a_banned_string(name: str) -> None:
    tokenizer, size = TOKENIZERS[name]

    @settings(max_examples=600, deadline=None)
    @given(ids=st.lists(st.integers(0, size - 1), max_size=25), banned=BANNED)
    def check(ids: list[int], banned: list[str]) -> None:
        matcher = BannedMatcher(StringAutomaton(banned), IncrementalDetokenizer(tokenizer))
        kept: list[int] = []
        certain = 0

        def take_back(match: Any, ended: bool) -> None:
            assert match.text in text_of(tokenizer, kept, ended=ended)
            assert 0 <= match.token < len(kept) - certain, "a certain token is taken back"
            del kept[certain + match.token :]
            matcher.rewind(match.token)

        for token_id in ids:
            kept.append(token_id)
            if (match := matcher.push(token_id)) is not None:
                take_back(match, False)
            certain += matcher.take_certain()
            text = text_of(tokenizer, kept, ended=False)
            assert not any(string in text for string in banned)
            begun = any(text.endswith(one[:end]) for one in banned for end in range(1, len(one)))
            waits = text != text_of(tokenizer, kept, ended=True)
            assert begun or waits or certain == len(kept), "a token is held back in vain"
        while (match := matcher.finish()) is not None:
            take_back(match, True)
        whole = text_of(tokenizer, kept, ended=True)
        assert not any(string in whole for string in banned)

    check()


def push_all(matcher: BannedMatcher, ids: Sequence[int]) -> Any:
    for token_id in ids:
        if (match := matcher.push(token_id)) is not None:
            return match
    return None


@pytest.mark.parametrize(
    ("ids", "banned", "index"),
    [
        ((0, 1, 0), ["ba"], 1),
        ((3, 4, 1), ["aabb"], 1),
        ((4, 1), ["aabb", "bb"], 0),  # both are complete: the longest
        ((0, 6, 7), ["\u00e9"], 1),  # the first byte of the character
        ((0, 8, 7), ["\u00e9"], 1),
        ((0, 6, 5, 7, 1), ["\u00e9b"], 1),
        ((6, 0), ["a"], 1),  # what waited before it is another character
    ],
)
def test_the_answer_goes_back_to_the_token_with_the_first_byte(
    ids: tuple[int, ...], banned: list[str], index: int
) -> None:
    matcher = BannedMatcher(StringAutomaton(banned), IncrementalDetokenizer(bytewise()))
    match = push_all(matcher, ids)
    assert match is not None and match.token == index and match.text in banned


def test_a_stop_string_ends_the_search_only_if_it_is_complete_first() -> None:
    for stop, can_stop, stopped in (
        ("a", True, True),
        ("ab", True, False),  # both at the same character: the banned one counts
        ("b", False, False),
    ):
        matcher = BannedMatcher(
            StringAutomaton(["ab"]),
            IncrementalDetokenizer(bytewise()),
            StopMatcher(StopStrings([stop])),
        )
        match = matcher.push(2, can_stop)
        assert matcher.stopped == stopped and (match is None) == stopped
