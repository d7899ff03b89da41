"""RWKV's "world" tokenizer: from left to right the longest token that the text goes on with.

Tokens are byte strings; GGUF files hold each as Python writes it (``\\xe4``, ``\\n``). Here they
are spelled in the alphabet of byte-level BPE, one character for each byte, as all other code
expects.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sdk.loaders.tokenizer.byte_level import BYTE_TABLE
from sdk.loaders.tokenizer.metadata import Metadata
from sdk.loaders.tokenizer.portions import check_count
from sdk.quant.errors import CheckpointError

_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
#: The vocabulary in folders: a line has an id, a token as Python writes it, and its bytes.
VOCABULARY = "rwkv_vocab_v20230424.txt"
_LINE = re.compile(r"""(\d+) (b?(?:'.*'|".*")) (\d+)""")
_MOST_BYTES, _LONGEST = 1 << 24, 2000


def unescaped(tokens: Sequence[str], kinds: bytes) -> list[str]:
    """Normal tokens in the alphabet of byte-level BPE; others stay."""
    return [
        _spelled(_ESCAPE.sub(_byte, text.encode("utf-8", "replace"))) if kind == _NORMAL else text
        for text, kind in zip(tokens, kinds, strict=True)
    ]


def folder_metadata(file: Path, size: int) -> dict[str, Any]:
    """What a GGUF file would say of the vocabulary in ``file``; ``size``: with ids of no token.

    :raises CheckpointError: a line is not as described above, or there are too many.
    """
    if file.stat().st_size > _MOST_BYTES:
        raise CheckpointError(f"{file}: expected at most {_MOST_BYTES} bytes")
    tokens = ["<s>"]
    lines = file.read_text("utf-8", "replace").split("\n")
    for number, line in enumerate(lines[:-1] if lines[-1] == "" else lines, 1):
        tokens.append(repr(_of_line(file, number, line))[2:-1])
    if len(tokens) > size:
        raise CheckpointError(f"{file}: expected at most {size} tokens, found {len(tokens)}")
    unused = range(len(tokens), size)
    kinds = [_CONTROL, *[_NORMAL] * (len(tokens) - 1), *[_UNUSED] * len(unused)]
    return {
        "tokenizer.ggml.model": "rwkv",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in unused)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def _of_line(file: Path, number: int, line: str) -> bytes:
    match = _LINE.fullmatch(line) if len(line) <= _LONGEST else None
    token: Any = None
    if match is not None and int(match[1]) == number:
        try:
            token = ast.literal_eval(match[2])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            token = None
    data = token.encode("utf-8", "replace") if isinstance(token, str) else token
    if match is None or not isinstance(data, bytes) or len(data) != int(match[3]):
        raise CheckpointError(
            f"{file}: line {number}: expected '{number} TOKEN BYTES', found {line[:80]!r}"
        )
    return data


def _byte(match: re.Match[bytes]) -> bytes:
    code, letter = match.groups()
    return bytes.fromhex(code.decode()) if code else _LETTERS.get(letter, letter)


def _spelled(data: bytes) -> str:
    return data.decode("latin-1").translate(BYTE_TABLE)


class LongestMatch:
    """Encodes with one vocabulary.

    :raises CheckpointError: a byte has no token, so that there are texts without tokens.
    """

    def __init__(self, meta: Metadata, pieces: Mapping[str, int]) -> None:
        lacking = [byte for byte in range(256) if BYTE_TABLE[byte] not in pieces]
        if lacking:
            found = f"none for byte {lacking[0]}"
            raise meta.error("tokenizer.ggml.tokens", "a token for each byte", found)
        self._pieces = pieces
        #: The lengths of tokens, longest first, by their first two characters.
        self._lengths: dict[str, list[int]] = {}
        found_lengths: dict[str, set[int]] = {}
        for piece in pieces:
            found_lengths.setdefault(piece[:2], set()).add(len(piece))
        for start, lengths in found_lengths.items():
            self._lengths[start] = sorted(lengths, reverse=True)

    def encode(self, text: str, stop_after: int | None = None) -> list[int]:
        """Token ids of ``text``.

        :raises TooManyTokens: there are more than ``stop_after``.
        """
        spelled, ids, at = _spelled(text.encode("utf-8", "replace")), list[int](), 0
        while at < len(spelled):
            for length in self._lengths.get(spelled[at : at + 2], ()):
                token = self._pieces.get(spelled[at : at + length])
                if token is not None:
                    break
            else:
                length, token = 1, self._pieces[spelled[at]]
            ids.append(token)
            at += length
            check_count(len(ids), stop_after)
        return ids
