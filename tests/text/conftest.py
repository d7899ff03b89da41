"""Vocabularies for the tests of text: real ones read from GGUF files, and two tiny ones."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from sdk.loaders.tokenizer.from_gguf import tokenizer_from_gguf

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


def read_metadata(path: Path) -> dict[str, Any]:
    """Key -> value of a (well-formed) GGUF file; independent of the loader under test elsewhere."""
    with path.open("rb") as file:
        data = file.read(32 * 1024 * 1024)
    (count,) = struct.unpack_from("<Q", data, 16)
    position = 24

    def scalar(kind: int) -> Any:
        nonlocal position
        if kind == 8:
            (size,) = struct.unpack_from("<Q", data, position)
            position += 8 + size
            return data[position - size : position].decode()
        (value,) = struct.unpack_from("<" + _SCALARS[kind], data, position)
        position += struct.calcsize("<" + _SCALARS[kind])
        return value

    values: dict[str, Any] = {}
    for _ in range(count):
        key = scalar(8)
        kind = scalar(4)
        if kind != 9:
            values[key] = scalar(kind)
        else:
            kind, length = scalar(4), scalar(10)
            values[key] = [scalar(kind) for _ in range(length)]
    return values


def byte_alphabet() -> list[str]:
    """The 256 characters of byte-level BPE, byte 0 first."""
    from sdk.loaders.tokenizer.byte_level import BYTE_OF

    return sorted(BYTE_OF, key=BYTE_OF.__getitem__)


def tiny_bpe(**changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary: 256 bytes, "he", "hel", "Ġhe", three control tokens."""
    tokens = [*byte_alphabet(), "he", "hel", "Ġhe", "<|end|>", "<|im_end|>", "<tool>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 259 + [3, 3, 4],
        "tokenizer.ggml.merges": ["h e", "he l", "Ġ he"],
        "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    }
    return {**metadata, **changes}


def tiny_spm(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary: specials, 256 byte tokens and a few pieces."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = ["▁", "a", "b", "<", ">", "s", "/", "ab", "▁a", "▁ab", "<s", "/s", "▁▁"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + pieces,
        "tokenizer.ggml.scores": [0.0] * len(tokens) + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**metadata, **changes}


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Any:
    return tokenizer_from_gguf(read_metadata(smollm2), str(smollm2))


@pytest.fixture(scope="session")
def gemma3_tokenizer(gemma3: Path) -> Any:
    return tokenizer_from_gguf(read_metadata(gemma3), str(gemma3))


@pytest.fixture(scope="session")
def golden_tokenizer(golden: Path) -> Any:
    path = golden / "arch-llama3" / "model.gguf"
    return tokenizer_from_gguf(read_metadata(path), str(path))


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BPE model trained by sentencepiece itself, with byte fallback, like Llama 2's."""
    import sentencepiece

    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer"
    text = "the cat sat on the mat and the dog said hello to the other cats in the world "
    lines = [text[i:] + text[: i % 37] for i in range(64)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path), vocab_size=340, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    return path.with_suffix(".model")


@pytest.fixture
def golden_metadata(golden: Path) -> Any:
    """A function: the metadata of the golden llama model, a fresh copy each time."""
    return lambda: read_metadata(golden / "arch-llama3" / "model.gguf")


@pytest.fixture
def bpe() -> Any:
    return tokenizer_from_gguf(tiny_bpe(), "tiny.gguf")


@pytest.fixture
def spm() -> Any:
    return tokenizer_from_gguf(tiny_spm(), "tiny.gguf")


@pytest.fixture
def make_metadata() -> Any:
    return {"gpt2": tiny_bpe, "llama": tiny_spm}
