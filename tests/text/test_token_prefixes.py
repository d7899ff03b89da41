"""Which tokens may continue a prompt whose last tokens were taken away."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings, strategies as st

from sdk.sampling.healing import Healing, TokenPrefixes


class Words:
    """A vocabulary of byte strings; the last one is a control token."""

    def __init__(self, *words: bytes) -> None:
        self.words = words
        self.vocab_size = len(words)
        self.special_ids = frozenset({len(words) - 1})

    def id_to_bytes(self, token_id: int) -> bytes:
        return self.words[token_id] if token_id < len(self.words) else b""


def allowed(healing: Healing, spelled: int = 0, size: int = 300) -> set[int]:
    forbidden = healing.change(spelled)
    return set(range(size)) - set(forbidden.ids[: forbidden.count].tolist())


def heal(words: list[bytes], ids: list[int]) -> tuple[int, Healing] | None:
    return TokenPrefixes(Words(*words), 300).heal(ids)


def test_a_token_is_taken_away_if_a_longer_one_begins_with_it() -> None:
    words = [b"http", b":", b"://", b"x", b"<end>"]
    found = heal(words, [0, 1])
    assert found is not None and found[0] == 1 and found[1].text == b":"
    assert allowed(found[1]) == {1, 2}
    assert found[1].after(0, 2) is None
    assert heal(words, [0, 3]) is None


def test_several_tokens_are_taken_away_if_a_longer_one_begins_with_all() -> None:
    words = [b"a", b"b", b"c", b"abcd", b"bc", b"<end>"]
    found = heal(words, [0, 0, 1, 2])
    assert found is not None and found[0] == 3 and found[1].text == b"abc"
    assert allowed(found[1]) == {0, 3}
    assert found[1].after(0, 0) == 1
    assert allowed(found[1], 1) == {1, 4}
    assert found[1].after(1, 1) == 2 and found[1].after(1, 4) is None


def test_parts_that_nothing_continues_are_not_allowed() -> None:
    found = heal([b"x", b"ab", b"a", b"abc", b"<end>"], [0, 1])
    assert found is not None and found[1].text == b"ab"
    assert allowed(found[1]) == {1, 3}  # after "a" no token begins with "b"


def test_the_first_token_and_control_tokens_stay() -> None:
    words = [b"a", b"ab", b"<", b"<end>"]
    assert heal(words, [0]) is None
    assert heal(words, []) is None
    assert heal(words, [0, 3]) is None
    found = heal(words, [0, 3, 0])
    assert found is not None and found[0] == 1
    assert allowed(found[1]) == {0, 1}
    assert heal(words, [0, 2]) is None  # the only longer one is a control token


def test_ids_without_a_token_are_neither_taken_nor_allowed() -> None:
    words = [b"a", b"ab", b"", b"<end>"]
    assert heal(words, [0, 2]) is None
    assert heal(words, [0, 299]) is None
    found = heal(words, [0, 0])
    assert found is not None and allowed(found[1]) == {0, 1}


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.binary(max_size=4).map(lambda b: bytes(x % 3 for x in b)), min_size=2),
    data=st.data(),
)
def test_the_allowed_tokens_are_those_that_can_spell_the_text(words: Any, data: Any) -> None:
    ids = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=6))
    found = heal(words, ids)
    usable = words[:-1]
    tails = [b"".join(words[i] for i in ids[-n:]) for n in range(1, len(ids))]
    if found is None:
        first = tails[0] if tails else b""
        longer = [w for w in usable if w.startswith(first) and len(w) > len(first)]
        assert not first or ids[-1] == len(words) - 1 or not longer
        return
    count, healing = found
    text = healing.text
    assert 1 <= count < len(ids) and text == tails[count - 1]
    assert any(w.startswith(text) and len(w) > len(text) for w in usable)

    def spells(rest: bytes) -> bool:
        return any(
            w and (w.startswith(rest) or (rest.startswith(w) and spells(rest[len(w) :])))
            for w in usable
        )

    for spelled in [0, *healing._allowed]:
        rest = text[spelled:]
        wanted = {
            i
            for i, w in enumerate(usable)
            if w and (w.startswith(rest) or (rest.startswith(w) and spells(rest[len(w) :])))
        }
        assert allowed(healing, spelled, len(words)) == wanted


def test_real_vocabularies_heal(smollm2_tokenizer: Any, gemma3_tokenizer: Any, spm: Any) -> None:
    for tokenizer in (smollm2_tokenizer, gemma3_tokenizer):
        prefixes = TokenPrefixes(tokenizer, tokenizer.vocab_size)
        ids = tokenizer.encode("see http:")
        found = prefixes.heal(ids)
        assert found is not None and found[1].text == b":"
        assert tokenizer.token_to_id("://") in allowed(found[1], 0, tokenizer.vocab_size)
    ids = spm.encode("b a")
    found = TokenPrefixes(spm, spm.vocab_size).heal(ids)
    assert found is not None and found[1].text == b" a"
    names = {spm.id_to_token(i) for i in allowed(found[1], 0, spm.vocab_size)}
    assert names == {"▁", "▁a", "▁ab", "<0x20>"}


def test_forbidden_tokens_are_made_once() -> None:
    found = heal([b"a", b"ab", b"<end>"], [0, 0])
    assert found is not None
    assert found[1].change(0) is found[1].change(0)
    assert np.array_equal(np.sort(found[1].change(0).ids), np.arange(2, 300))
