"""RWKV's "world" tokenizer: from left to right the longest token that the text goes on with.

Tokens are byte strings; GGUF files hold each as Python writes it (``\\xe4``, ``\\n``). Here they
are spelled in the alphabet of byte-level BPE, one character for each byte, as all other code
expects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sdk.loaders.tokenizer.byte_level import BYTE_TABLE
from sdk.loaders.tokenizer.metadata import Metadata
from sdk.loaders.tokenizer.portions import check_count

_ESCAPE = re.compile(rb"\\(?:x([0-9a-f]{2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r"}
_NORMAL = 1


def unescaped(tokens: Sequence[str], kinds: bytes) -> list[str]:
    """Normal tokens in the alphabet of byte-level BPE; others stay."""
    return [
        _spelled(_ESCAPE.sub(_byte, text.encode("utf-8", "replace"))) if kind == _NORMAL else text
        for text, kind in zip(tokens, kinds, strict=True)
    ]


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
