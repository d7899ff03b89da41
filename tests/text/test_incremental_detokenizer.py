"""Text that arrives token by token equals the text decoded at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sdk.loaders.tokenizer.base import TokenizerFacts
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.text.detokenizer import IncrementalDetokenizer
from sdk.tokenizer import LLMTokenizer

WORDS = ["hello", "##ing", "##s", ".", ",", "n", "'", "t", "do", "world", "[SEP]", "[CLS]"]
PIECES = ["▁", "▁hello", "a", "▁▁", "b▁c", "é", "日", *(f"<0x{byte:02X}>" for byte in range(256))]


def library_tokenizer(kind: str) -> JsonTokenizer:
    """A tokenizer.json style tokenizer with the given decoder."""
    if kind == "wordpiece":
        vocabulary = {word: index for index, word in enumerate(WORDS)}
        backend = Tokenizer(models.WordPiece(vocabulary, unk_token="n"))
        backend.decoder = decoders.WordPiece(cleanup=True)
        backend.add_special_tokens([AddedToken("[SEP]"), AddedToken("[CLS]")])
        special = {backend.token_to_id("[SEP]"), backend.token_to_id("[CLS]")}
        return JsonTokenizer(backend, TokenizerFacts(special_ids=frozenset(special)), "test")
    vocabulary = {piece: index for index, piece in enumerate(PIECES)}
    backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    if kind == "bpe suffix":
        backend.decoder = decoders.BPEDecoder("a")
    elif kind == "metaspace":
        backend.decoder = decoders.Metaspace()
    else:
        chain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind == "sentencepiece":
            chain.append(decoders.Strip(" ", 1, 0))
        backend.decoder = decoders.Sequence(chain)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return JsonTokenizer(backend, TokenizerFacts(special_ids=frozenset({5})), "test")


KINDS = ["wordpiece", "bpe suffix", "metaspace", "sentencepiece", "no strip"]
LIBRARY = {kind: library_tokenizer(kind) for kind in KINDS}


def streamed(tokenizer: Any, ids: list[int], **options: Any) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.finish()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["bpe", "spm", "smollm2_tokenizer", "gemma3_tokenizer"])
def test_random_ids_of_gguf_vocabularies(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)

    @settings(max_examples=300, deadline=None)
    @given(
        ids=st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=40)
        | st.lists(st.integers(0, 300), max_size=40),
        skip=st.booleans(),
    )
    def check(ids: list[int], skip: bool) -> None:
        assert streamed(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip)

    check()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_of_library_tokenizers(kind: str, data: Any, skip: bool) -> None:
    tokenizer = LIBRARY[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=30))
    assert streamed(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_the_decoders_that_can_are_byte_by_byte(kind: str) -> None:
    assert LIBRARY[kind].bytewise is (kind not in ("wordpiece", "bpe suffix"))
    assert LIBRARY[kind].strips_leading_space is (kind in ("metaspace", "sentencepiece"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_ids_are_those_of_their_text(kind: str) -> None:
    tokenizer = LLMTokenizer(LIBRARY[kind])
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    text = tokenizer.decode(ids)
    assert ids and tokenizer.decode_bytes(ids).decode().lstrip(" ") == text.lstrip(" ")


@pytest.mark.parametrize("kind", ["metaspace", "sentencepiece", "no strip"])
def test_byte_by_byte_decoding_equals_the_library(kind: str) -> None:
    tokenizer = LIBRARY[kind]
    ids = [tokenizer.token_to_id(piece) for piece in ("▁hello", "▁", "a", "é", "▁▁", "b▁c", "日")]
    if kind != "metaspace":  # its decoder knows no bytes
        ids += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "😀é".encode()]
    assert tokenizer.decode(ids, False) == tokenizer._backend.decode(ids, skip_special_tokens=False)


def test_a_character_is_shown_when_its_last_byte_arrives(bpe: Any) -> None:
    detokenizer = IncrementalDetokenizer(bpe)
    shown = [detokenizer.push(byte) for byte in "é😀!".encode()]
    assert shown == ["", "é", "", "", "", "😀", "!"]
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_flushed_as_one_replacement(bpe: Any) -> None:
    detokenizer = IncrementalDetokenizer(bpe)
    assert detokenizer.extend([0x61, 0xF0, 0x9F, 0x98]) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_a_special_token_between_the_bytes_of_a_character_is_skipped(bpe: Any) -> None:
    assert streamed(bpe, [0xC3, 260, 0xA9]) == "é"
    assert streamed(bpe, [0xC3, 260, 0xA9], skip_special_tokens=False) == "\ufffd<|im_end|>\ufffd"


def test_the_first_space_is_dropped_only_at_the_beginning_of_a_text(spm: Any) -> None:
    ids = spm.encode("ab ab", add_special_tokens=False)
    assert streamed(spm, ids) == "ab ab"
    assert streamed(spm, ids, prompt_token_ids=[1, 260]) == " ab ab"


def test_a_window_goes_on_from_the_prompt() -> None:
    tokenizer = LIBRARY["wordpiece"]
    prompt, answer = [8, 0], [1, 9, 3]  # "do hello" + "##ing world ."
    assert streamed(tokenizer, answer, prompt_token_ids=prompt) == "ing world."


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = LIBRARY["wordpiece"]
    ids = [0, 10, 11, 9]
    shown = {"skip_special_tokens": False}
    assert streamed(tokenizer, ids, **shown) == "hello [SEP] [CLS] world"
    tight = streamed(tokenizer, ids, spaces_between_special_tokens=False, **shown)
    assert tight == "hello [SEP][CLS] world"
    assert streamed(tokenizer, ids, spaces_between_special_tokens=False) == "hello world"


def test_no_token_is_decoded_more_than_a_few_times(bpe: Any, monkeypatch: Any) -> None:
    calls = 0
    original = LIBRARY["wordpiece"].decode

    def counted(ids: list[int], skip_special_tokens: bool = True) -> str:
        nonlocal calls
        calls += len(ids)
        return original(ids, skip_special_tokens)

    monkeypatch.setattr(LIBRARY["wordpiece"], "decode", counted)
    monkeypatch.setattr(bpe, "decode", None)
    streamed(LIBRARY["wordpiece"], [0, 1, 9, 3] * 250)
    assert calls < 6 * 1000
    assert len(streamed(bpe, [104] * 1000)) == 1000
