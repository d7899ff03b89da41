"""PLaMo 2's tokenizer: the tokens with the largest sum of scores."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.quant.errors import CheckpointError
from sdk.quant.tokenizer import TooManyTokens

SPECIALS = ["<|plamo:unk|>", "<|plamo:bos|>", "<|plamo:eos|>", "<|plamo:pad|>"]
#: Normal tokens and their scores. "aa" twice costs as much as "aaa" and "a"; "never" and "x" are
#: not used.
SCORES = {
    "a": -3.0,
    "aa": -4.0,
    "aaa": -5.0,
    "b": -2.5,
    "ab": -5.4,
    "ba": -5.6,
    " ": -2.0,
    " a": -4.9,
    "日": -6.0,
    "日本": -7.5,
    "本語": -8.0,
    "日本語": -16.0,
    "é": -9.0,
    "the": -3.25,
    "<s>": -7.0,
    "ther": -30.0,
    "never": -2000.0,
    "x": float("nan"),
    "\n": -1.0,
    "b a": -7.00004,
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = [*SPECIALS, *BYTES, *SCORES]
#: Texts and their ids in llama.cpp (llama-cpp-python 0.3.36), which read a file of these tokens.
LLAMA_CPP = {
    "the ab ba aaaa": [273, 267, 263, 266, 263, 260, 267, 262],
    "aaaab  a\n日本語é": [262, 264, 266, 267, 278, 268, 270, 272],
    "\ufeffa😀x never": [260, 244, 163, 156, 132, 124, 266, 114, 105, 122, 105, 118],
    "\ufeff": [],
    "ther<s> 日本日": [275, 274, 266, 269, 268],
    "b a b aé": [279, 266, 279, 272],
}


def metadata(lacks: int | None = None) -> dict[str, Any]:
    """``lacks``: a byte without a token."""
    spelled = [one for byte, one in enumerate(BYTES) if byte != lacks]
    key, first = "tokenizer.ggml.", len(SPECIALS) + len(spelled)
    return {
        key + "model": "plamo2",
        key + "tokens": [*SPECIALS, *spelled, *SCORES],
        key + "scores": [0.0] * first + [*SCORES.values()],
        key + "token_type": [2, 3, 3, 3, *[6] * len(spelled), *[1] * len(SCORES)],
        key + "add_bos_token": True,
    }


@cache
def tokenizer() -> Any:
    return tokenizer_from_gguf(metadata(), "x.gguf")


@cache
def cheapest(text: str) -> tuple[int, list[int]]:
    """Every way to go on tried at each place; of equal ones that with the longest token first."""
    if not text:
        return 0, []
    ways: list[tuple[int, list[int]]] = []
    for end in range(len(text), 0, -1):
        score = SCORES.get(text[:end])
        if score is not None and score > -2000:
            cost, ids = cheapest(text[end:])
            ways.append((cost + round(-score * 10_000), [TOKENS.index(text[:end]), *ids]))
    cost, ids = cheapest(text[1:])
    spelled = [TOKENS.index(f"<0x{byte:02X}>") for byte in text[0].encode()]
    ways.append((cost + 10_000_000, [*spelled, *ids]))
    return min(ways, key=lambda way: way[0])  # the first of equals


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("aab  日本語éthern\nx<s>0😀\ufeff"), max_size=14))
def test_ids_are_those_of_the_largest_sum_and_decode_to_the_text(text: str) -> None:
    own = tokenizer()
    ids = own.encode(text, add_special_tokens=False)
    read = text.removeprefix("\ufeff")
    assert ids == cheapest(read)[1]
    assert own.decode(ids) == read


@pytest.mark.parametrize("text", LLAMA_CPP)
def test_ids_are_llama_cpp_s(text: str) -> None:
    assert tokenizer().encode(text) == [1, *LLAMA_CPP[text]]


def test_text_becomes_no_special_token_unless_asked() -> None:
    own = tokenizer()
    assert own.encode("<|plamo:eos|>", parse_special=True)[1:] == [2]
    found = own.encode("<|plamo:eos|>", parse_special=False)
    assert 2 not in found and own.decode(found[1:]) == "<|plamo:eos|>"
    literal = own.encode("<0x41>", add_special_tokens=False)
    assert literal == [TOKENS.index(f"<0x{byte:02X}>") for byte in b"<0x41>"]


def test_a_long_text_stops_at_the_limit() -> None:
    own = tokenizer()
    with pytest.raises(TooManyTokens):
        own.encode("ab" * 20_000, stop_after=100)
    assert len(own.encode("ab" * 20_000)) == 20_001


def test_a_vocabulary_without_a_byte_is_refused() -> None:
    with pytest.raises(CheckpointError, match="for each, found none for byte 65"):
        tokenizer_from_gguf(metadata(lacks=65), "x.gguf")


def test_a_vocabulary_without_scores_is_refused() -> None:
    found = metadata()
    del found["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match="expected the scores of the tokens"):
        tokenizer_from_gguf(found, "x.gguf")
