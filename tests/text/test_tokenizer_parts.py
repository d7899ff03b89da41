"""What a tokenizer.json may do to a text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.quant.errors import CheckpointError

LETTERS = "abcdefghijklmnopqrstuvwxyz 1"
DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
A, B = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
TOKEN = {"SpecialToken": {"id": "a", "type_id": 0}}


def write(folder: Path, **parts: Any) -> Path:
    from tokenizers import Tokenizer, models

    vocab = {letter: i for i, letter in enumerate(["<unk>", *LETTERS])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    content = json.loads(backend.to_str()) | {"decoder": {"type": "Fuse"}} | parts
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def split(pattern: str) -> dict[str, Any]:
    return {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
    }


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def template(single: list[Any], count: int = 1) -> dict[str, Any]:
    return {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [A, B],
            "special_tokens": {"a": {"id": "a", "ids": [1] * count, "tokens": ["a"] * count}},
        }
    }


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "growing normalizer": ({"normalizer": sequence("normalizers", *[DOUBLE] * 20)}, "128 times"),
    "nested sequences": (
        {"normalizer": sequence("normalizers", *[sequence("normalizers", DOUBLE, DOUBLE)] * 9)},
        "128 times",
    ),
    "one large replacement": ({"normalizer": {**DOUBLE, "content": "a" * 100}}, "100 times"),
    "replacing nothing": (
        {"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 100}},
        "101 times",
    ),
    "bytes of bytes": (
        {"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 9)},
        "128 times",
    ),
    "growing in two parts": (
        {"normalizer": sequence("normalizers", *[DOUBLE] * 6), "pre_tokenizer": BYTES},
        "pre_tokenizer: a text may become 128 times",
    ),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "a" * 5000}}, "adds 5000"),
    "many steps": ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 33)}, "33 steps"),
    "growing decoder": ({"decoder": sequence("decoders", *[DOUBLE] * 28)}, "decoder: .*128 times"),
    "stripping the end": (
        {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 5}},
        "stop is 5, expected 0",
    ),
    "a long template": (template([A, *[TOKEN] * 100_000]), "single: adds 100000"),
    "a token of many": (template([A, TOKEN], 100_000), "single: adds 100000"),
    "a text twice": (template([A, A]), "single: expected each text once"),
    "repetition of repetitions": (split("(a+)+$"), "unbounded repetition inside"),
    "deeper repetition": (split(r"((?:[(a]\)|b*)c){2,}"), "unbounded repetition inside"),
    "a long expression": (split("a" * 5000), "5000 characters"),
    "long words": (
        {"model": {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##",
                   "max_input_chars_per_word": 10**9, "vocab": {"a": 0, "1": 1}}},
        "max_input_chars_per_word of 1000000000",
    ),
    "a long token": (
        {"added_tokens": [{"id": 29, "content": "a" * 5000, "single_word": False, "lstrip": False,
                           "rstrip": False, "normalized": False, "special": False}]},
        "an added token of 5000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_part_that_makes_too_much_of_a_text_is_refused_when_it_is_loaded(
    tmp_path: Path, kind: str
) -> None:
    parts, words = HOSTILE[kind]
    with pytest.raises(CheckpointError, match=f"tokenizer.json: .*{words}"):
        tokenizer_from_folder(write(tmp_path, **parts))


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"decoder": sequence(
            "decoders",
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        )},
        {"normalizer": sequence(
            "normalizers",
            {"type": "NFKC"},
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
            {"type": "Strip", "strip_left": True, "strip_right": True},
        )},
        template([TOKEN, A, TOKEN]),
        split(r"(?i:'s|'t)|[^\r\n\p{L}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}]+[\r\n]*|\s+(?!\S)|\s+"),
        split(r"\d{1,3}(?=(?:\d{3})*\b)"),
        split(r" ?[^(\s|[.,!?])]+"),
        split(r"[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'re)?|\(\+\)+"),
    ],
)  # fmt: skip
def test_parts_of_tokenizers_in_use_are_accepted(tmp_path: Path, parts: dict[str, Any]) -> None:
    tokenizer = tokenizer_from_folder(write(tmp_path, **parts))
    assert tokenizer is not None and tokenizer.encode("abc")


def test_a_file_of_many_bytes_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(129 << 20)
    with pytest.raises(CheckpointError, match=r"tokenizer.json: \d+ bytes, expected at most"):
        tokenizer_from_folder(tmp_path)


PANIC = """
import sys
from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder
from sdk.quant.errors import CheckpointError
from tokenizers import Regex, decoders, pre_tokenizers
tokenizer = tokenizer_from_folder(sys.argv[1])
backend = tokenizer._backend
backend.decoder = decoders.Strip("a", 0, 5)  # panics on tokens that are shorter
backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # backtracks, then panics
for call in (lambda: tokenizer.decode([1]), lambda: tokenizer.encode("a" * 40 + "b")):
    try:
        call()
    except CheckpointError as error:
        print("refused:", "tokenizer.json" in str(error))
print(tokenizer.decode([2]), tokenizer.encode("b"))
"""


def test_a_panic_of_the_library_is_an_error_of_the_call_and_the_next_call_works(
    tmp_path: Path,
) -> None:
    """In a child, because the library itself prints where it panicked."""
    child = subprocess.run(
        [sys.executable, "-c", PANIC, str(write(tmp_path))],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert child.stdout.splitlines() == ["refused: True", "refused: True", "b [2]"]
