"""RWKV's tokenizer: the longest token at each place, of any bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf
from sdk.quant.errors import CheckpointError
from sdk.quant.tokenizer import TooManyTokens

T = "tokenizer.ggml."
#: Some longer than what text goes on with, halves of characters, and those that Python escapes.
LONGER = [
    *(b"\n\n", b" the", b" t", b"ther", b"the", b"\\n", b"it's", b"'", b"\t\t", b"\r\n"),
    *("ä".encode(), "你好".encode(), "你".encode()[:2], "好".encode()[1:] + b"!", b"\x00\x00"),
    *(b"aaaaaaaa", b"aa", b"aaa"),
]
TOKENS = [bytes([i]) for i in range(256)] + [one for one in LONGER if len(one) > 1]

#: Ids of "then the ä你好!\n\nit's\\n aaaaa".
LLAMA_CPP = [261, 111, 258, 33, 266, 267, 34, 257, 263, 262, 33, 273, 272]


def metadata(tokens: list[bytes] = TOKENS) -> dict[str, Any]:
    spelled = ["<s>", *(repr(one)[2:-1] for one in tokens), "[PAD300]"]
    return {
        "tokenizer.ggml.model": "rwkv",
        T + "tokens": spelled,
        T + "token_type": [3, *[1] * len(tokens), 5],
        T + "bos_token_id": 0,
        T + "eos_token_id": 0,
        T + "eot_token_id": 257,
    }


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_from_gguf(metadata(), "x.gguf")


def longest(data: bytes) -> list[int]:
    """Every token tried at each place."""
    ids: list[int] = []
    while data:
        best = max((one for one in TOKENS if data.startswith(one)), key=len)
        ids.append(1 + TOKENS.index(best))
        data = data[len(best) :]
    return ids


@settings(max_examples=200)
@given(st.text(alphabet=st.sampled_from("aathe itr'\\n\n\r\täöß你好!\0😀")))
def test_ids_are_those_of_the_longest_tokens_and_decode_to_the_text(
    tokenizer: Any, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == longest(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_ids_equal_llama_cpp(tokenizer: Any) -> None:
    """Of llama-cpp-python 0.3.36, for a file of llama.cpp's converter with these tokens."""
    assert tokenizer.encode("then the ä你好!\n\nit's\\n aaaaa") == LLAMA_CPP


def test_the_end_of_an_answer_may_also_be_text(tokenizer: Any) -> None:
    assert tokenizer.eos_token_ids == {0, 257}
    assert tokenizer.encode("\n\n") == [257]
    assert tokenizer.encode("<s>") == [0] and 0 not in tokenizer.encode("<s>", parse_special=False)


def test_a_limit_ends_the_work(tokenizer: Any) -> None:
    with pytest.raises(TooManyTokens):
        tokenizer.encode("xyz" * 1000, stop_after=20)


def test_a_vocabulary_without_a_byte_is_refused() -> None:
    lacking = [one for one in TOKENS if one != b"\x07"]
    with pytest.raises(CheckpointError, match="a token for each byte, found none for byte 7"):
        tokenizer_from_gguf(metadata(lacking), "x.gguf")


def vocabulary(folder: Path, lines: list[str]) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(TOKENS) + 2}))
    (folder / "rwkv_vocab_v20230424.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def test_a_folder_has_the_tokens_of_its_file(tokenizer: Any, tmp_path: Path) -> None:
    lines = []
    for number, token in enumerate(TOKENS, 1):
        try:
            spelled = repr(token.decode())
        except UnicodeDecodeError:
            spelled = repr(token)
        lines.append(f"{number} {spelled} {len(token)}\n")
    found = tokenizer_from_folder(vocabulary(tmp_path, lines))
    assert found is not None and found.vocab_size == len(TOKENS) + 2
    for text in ("then the ä你好!\n\nit's\\n aaaaa", "'\"\x00\t"):
        assert found.encode(text) == tokenizer.encode(text)
    assert found.eos_token_ids == {0}


@pytest.mark.parametrize(
    "line",
    ["2 'a' 1\n", "1 'a' 2\n", "1 a 1\n", "1 'a' + 'b' 2\n", "1 '" + 3000 * "a" + "' 3000\n"],
)
def test_a_damaged_line_of_a_vocabulary_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="line 1: expected '1 TOKEN BYTES'"):
        tokenizer_from_folder(vocabulary(tmp_path, [line]))


def test_a_vocabulary_may_not_be_larger_than_the_model(tmp_path: Path) -> None:
    lines = [f"{i} 'a' 1\n" for i in range(1, len(TOKENS) + 5)]
    with pytest.raises(CheckpointError, match="expected at most 275 tokens, found 278"):
        tokenizer_from_folder(vocabulary(tmp_path, lines))
    (tmp_path / "rwkv_vocab_v20230424.txt").write_bytes(b" " * ((1 << 24) + 1))
    with pytest.raises(CheckpointError, match="expected at most 16777216 bytes"):
        tokenizer_from_folder(tmp_path)
