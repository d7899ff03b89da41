"""Byte-level BPE (GPT-2 and its successors): every byte is written as one printable character.

A text is split into words by the model's regular expressions; each word is written in the byte
alphabet and merged by rank. The ``tokenizers`` library splits and merges, with exact results.
``pretokenizers.py`` has the expressions for a GGUF file's ``tokenizer.ggml.pre``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from sdk.loaders.tokenizer.portions import PortionEncoder, check_count, run_library
from sdk.loaders.tokenizer.pretokenizers import PreTokenizer


def _alphabet() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 characters are themselves, others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF = _alphabet()
#: For ``str.translate`` of bytes read as Latin-1.
BYTE_TABLE = {byte: character for character, byte in BYTE_OF.items()}

#: ``(text, stop_after) -> ids``, see ``Tokenizer.encode``.
EncodeText = Callable[[str, "int | None"], list[int]]


def token_bytes(token: str) -> bytes:
    """The bytes of a token in the byte alphabet; any other spelling is taken literally."""
    try:
        return bytes([BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def byte_level_encoder(
    pieces: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    pre: PreTokenizer,
) -> EncodeText:
    """A function from text to ids. ``pieces``: spelling -> id, without control tokens.

    Raises the library's exceptions if a merge does not lead from pieces to a piece.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    model = models.BPE(vocab=dict(pieces), merges=merges, ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    steps = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        for pattern in pre.patterns
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])

    return PortionEncoder(tokenizer, list(pieces), BYTE_TABLE, divisible=not pre.joins_words).encode


def raw_encoder(pieces: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> EncodeText:
    """Gemma 4's BPE: characters, not bytes; ``▁`` is a space, ``<0xNN>`` a byte of unknown ones.

    A line is one word; a run of newlines is one token if the vocabulary has it.
    """
    from tokenizers import Tokenizer, models

    # The model needs the byte tokens for its fallback, although no merge leads to them.
    tokenizer = Tokenizer(models.BPE(vocab=dict(pieces), merges=merges, byte_fallback=True))

    def encode(text: str, stop_after: int | None = None) -> list[int]:
        ids: list[int] = []
        for match in re.finditer(r"\n+|[^\n]+", text):
            line = match[0]
            newlines = pieces.get(line) if line[0] == "\n" else None
            if newlines is None:
                ids += run_library(tokenizer, line)
            else:
                ids.append(newlines)
            check_count(len(ids), stop_after)
        return ids

    return encode
