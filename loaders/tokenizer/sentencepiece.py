"""A SentencePiece model file (``tokenizer.model``), read directly.

The file is a protocol buffer: pieces with score and type, and the normalization. A BPE model
without normalization (Llama 2, Mistral, Gemma) is exactly what a GGUF file stores under
``tokenizer.ggml.model = llama``, so it is converted to that metadata; even the numbers of piece
types are the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sdk.loaders.tokenizer.spm import SPACE
from sdk.quant.errors import CheckpointError

_BPE = 2  # TrainerSpec.ModelType
_USER_DEFINED = 4  # SentencePiece.Type
_MAX_BYTES = 64 * 1024 * 1024


class SentencePiece(NamedTuple):
    """What a file says. ``kinds``: of pieces, ``trainer``, ``normalizer``: the fields of these
    messages by number."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]
    trainer: dict[int, Any]
    normalizer: dict[int, Any]


def read_sentencepiece(file: Path) -> SentencePiece:
    """:raises CheckpointError: the file is not a SentencePiece model."""
    size = file.stat().st_size
    if size > _MAX_BYTES:
        raise CheckpointError(f"{file}: expected at most {_MAX_BYTES} bytes, found {size}")
    found = SentencePiece([], [], [], {}, {})
    try:
        for field, value in _fields(file.read_bytes()):
            if field == 1:
                piece = dict(_fields(value))
                found.tokens.append(piece[1].decode("utf-8"))
                found.scores.append(struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0])
                found.kinds.append(int(piece.get(3, 1)))
            elif field == 2:
                found.trainer.update(_fields(value))
            elif field == 3:
                found.normalizer.update(_fields(value))
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        why = str(error) or type(error).__name__
        raise CheckpointError(f"{file}: expected a tokenizer model, found {why}") from None
    if not found.tokens:
        raise CheckpointError(f"{file}: expected a tokenizer model, found no pieces")
    return found


def sentencepiece_metadata(file: Path) -> dict[str, Any] | None:
    """The model as GGUF tokenizer metadata; None for kinds of models that cannot be converted.

    :raises CheckpointError: the file is not a SentencePiece model.
    """
    model = read_sentencepiece(file)
    normalizer = model.normalizer
    prepared = bool(normalizer.get(2)) or bool(normalizer.get(4, 1))
    if model.trainer.get(3, 1) != _BPE or prepared:
        return None
    pieces = zip(model.tokens, model.kinds, strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        # in GGUF files these spell the text itself
        "tokenizer.ggml.tokens": [
            token.replace(SPACE, " ") if kind == _USER_DEFINED else token for token, kind in pieces
        ],
        "tokenizer.ggml.scores": model.scores,
        "tokenizer.ggml.token_type": model.kinds,
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
    }


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a message: int for varints, bytes for all others."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind == 2:
            length, position = _varint(data, position)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if position + length > len(data):
            raise ValueError("the end of the file inside a field")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise ValueError("a broken number")
