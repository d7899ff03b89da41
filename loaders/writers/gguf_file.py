"""Writes a GGUF container: metadata, the list of tensors, and their bytes from parts.

Integers are u32 (i32 where one is negative, u64 where it is larger) and floats f32, which is what
every key llama.cpp reads expects. Source: ggml's docs/gguf.md, version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sdk.loaders.formats.gguf_types import GGUF_TYPES
from sdk.loaders.writers.parts import PartTensor, copy_data, new_file
from sdk.quant.errors import QuantizationError

_ALIGNMENT = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY, _U64 = 4, 5, 6, 7, 8, 9, 10
_NUMBERS = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
            "bool": 7, "uint64": 10, "int64": 11, "float64": 12}  # fmt: skip
_TYPE_IDS = {kind.name: number for number, kind in GGUF_TYPES.items()}


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A tensor: ``shape`` in torch's order, the name of its ``type``, its bytes in parts."""

    name: str
    shape: tuple[int, ...]
    type: str
    data: tuple[PartTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.data)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[GgufEntry]) -> None:
    """Write a GGUF file, little-endian, version 3.

    :raises QuantizationError: a value that metadata cannot hold.
    :raises OSError: it cannot be written.
    """
    with new_file(path) as out:
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            out.write(_string(key) + _typed(key, value))
        offset = 0
        for tensor in tensors:
            out.write(_string(tensor.name) + struct.pack("<I", len(tensor.shape)))
            out.write(struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)))
            out.write(struct.pack("<IQ", _TYPE_IDS[tensor.type], offset))
            offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
        for tensor in tensors:
            _align(out)
            for part in tensor.data:
                copy_data(part, out)
        _align(out)


def _align(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % _ALIGNMENT))


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _typed(key: str, value: Any) -> bytes:
    """The type and the bytes of a value."""
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        if value > 0xFFFFFFFF:
            return struct.pack("<IQ", _U64, value)
        return struct.pack("<II", _U32, value) if value >= 0 else struct.pack("<Ii", _I32, value)
    if isinstance(value, float):
        return struct.pack("<If", _F32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.name in _NUMBERS:
        kind = _NUMBERS[value.dtype.name]
        head = struct.pack("<IIQ", _ARRAY, kind, len(value))
        return head + value.astype(value.dtype.newbyteorder("<")).tobytes()
    if isinstance(value, list) and value and all(isinstance(item, bool) for item in value):
        return struct.pack(f"<IIQ{len(value)}?", _ARRAY, _BOOL, len(value), *value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        head = struct.pack("<IIQ", _ARRAY, _STRING, len(value))
        return head + b"".join(map(_string, value))
    raise QuantizationError(
        f"{key}: expected a number, a text or a list of them, found {type(value).__name__}, which "
        "GGUF metadata cannot hold"
    )
