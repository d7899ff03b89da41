"""Reads the header of one GGUF file: its metadata and the list of its tensors.

A GGUF file (versions 2 and 3) is::

    "GGUF" | u32 version | u64 number of tensors | u64 number of metadata entries
    metadata entries    name, u32 type, value
    tensor descriptions name, u32 dimensions, u64 dims[], u32 type, u64 offset
    padding to `general.alignment` (32 if absent), then the tensors' data, each padded the same way

A string is a u64 length and that many bytes of UTF-8; an array is a u32 element type, a u64 length
and the elements. All these numbers are untrusted: each is checked, as a Python integer (which
cannot overflow), against the real size of the file before anything is allocated or sliced. The
whole metadata may take at most `METADATA_BUDGET` bytes of memory.

Number arrays become numpy arrays in one copy; string arrays are read many at a time
(`strings.py`) or in one tight loop: the 262,144-token vocabulary of Gemma 3 takes about 0.1 s.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.dataclass import dataclass
from sdk.loaders.formats.gguf_types import GGUF_TYPES, REMOVED_TYPES, GgufType
from sdk.loaders.gguf_files.strings import short_strings
from sdk.loaders.model_file import ModelFile
from sdk.quant.errors import CheckpointError, UnsupportedError

logger = logging.getLogger("sdk")

#: Limit on the memory for one file's metadata. A 262k-token vocabulary with its scores and types
#: takes 22 MB, one with 514k merges about 60 MB.
METADATA_BUDGET = 128 << 20
#: Limit on one string: a tokenizer.json inside the metadata can have 33 MB.
MAX_STRING = 64 << 20
MAX_ALIGNMENT = 1 << 20
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4
MAX_TENSOR_NAME = 63
_DEFAULT_ALIGNMENT = 32
#: Bytes of a file to read first: the header of a model with 49,152 tokens takes 1.8 MB.
_FIRST_READ = 2 << 20
# Bytes of a small Python object in addition to its contents, charged to the budget.
_OBJECT_COST = 64
_ARRAY_COST = 128

_REMOVED = "was removed from the format; convert the original model again, to Q4_0 or IQ4_NL"

_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9
#: numpy type character by metadata type number (bool is read as u8 and compared with 0).
_NUMBERS = {
    0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1",
    10: "u8", 11: "i8", 12: "f8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Position and type of one tensor. ``shape`` is in torch's order (the file's is reversed)."""

    name: str
    shape: tuple[int, ...]
    type: GgufType
    start: int
    nbytes: int
    shard: int


class GgufHeader:
    """Reads the header once, front to back."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file
        #: The beginning of the file, as far as it has been needed.
        self.buffer = b""
        self.order = "<"
        self.position = 0
        self.budget = METADATA_BUDGET
        self.fetch(min(4, file.size))
        magic = self.buffer[:4]
        if magic != b"GGUF":
            raise CheckpointError(f"{file.path}: not a GGUF file: it starts with {magic!r}")
        self.position = 4
        version = self.unsigned(4, "version")
        if version & 0xFFFF == 0 and version:
            self.order = ">"
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in (2, 3):
            raise CheckpointError(f"{file.path}: GGUF version {version}, expected 2 or 3")
        self.num_tensors = self.unsigned(8, "number of tensors")
        self.num_entries = self.unsigned(8, "number of metadata entries")
        # The shortest entry is a one-letter name and one byte: 8 + 1 + 4 + 1 bytes.
        self.check_count(self.num_entries, 14, "number of metadata entries")
        # The shortest description has a one-letter name and one dimension: 8 + 1 + 4 + 8 + 4 + 8.
        self.check_count(self.num_tensors, 33, "number of tensors")

    # -- bytes ---------------------------------------------------------------------------------

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {what}")

    def fetch(self, end: int) -> int:
        """Read at least the first ``end`` bytes of the file into ``buffer``; returns its length."""
        have = len(self.buffer)
        if end > have:
            wanted = min(max(end, 2 * have, _FIRST_READ), self.file.size)
            self.buffer += self.file.read(have, wanted - have).data
        return len(self.buffer)

    def take(self, nbytes: int, what: str) -> int:
        """Move past ``nbytes`` bytes and return their start."""
        start = self.position
        if nbytes > self.file.size - start:
            raise self.fail(
                f"{what}: {nbytes} bytes expected at byte {start}, "
                f"the file ends after {self.file.size - start}"
            )
        self.fetch(start + nbytes)
        self.position = start + nbytes
        return start

    def check_count(self, count: int, nbytes: int, what: str) -> None:
        left = self.file.size - self.position
        if count * nbytes > left:
            raise self.fail(
                f"{what} is {count}, which needs at least {count * nbytes} bytes; {left} are left"
            )

    def charge(self, nbytes: int, what: str) -> None:
        self.budget -= nbytes
        if self.budget < 0:
            raise self.fail(f"{what}: the metadata needs more than {METADATA_BUDGET >> 20} MiB")

    def unsigned(self, nbytes: int, what: str) -> int:
        start = self.take(nbytes, what)
        order = "little" if self.order == "<" else "big"
        return int.from_bytes(self.buffer[start : start + nbytes], order)  # type: ignore[arg-type]

    def text(self, what: str, limit: int) -> str:
        length = self.unsigned(8, f"length of {what}")
        if length > limit:
            raise self.fail(f"{what} is {length} bytes long, at most {limit} are allowed")
        start = self.take(length, what)
        self.charge(length + _OBJECT_COST, what)
        try:
            value = self.buffer[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {error}") from None
        if "\0" in value:
            raise self.fail(f"{what} holds a NUL character: {value[:80]!r}")
        return value

    # -- metadata ------------------------------------------------------------------------------

    def metadata(self) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for index in range(self.num_entries):
            key = self.text(f"name of metadata entry {index}", limit=65535)
            if not key:
                raise self.fail(f"metadata entry {index} has an empty name")
            if key in seen:
                raise self.fail(f"metadata entry {key!r} occurs twice")
            seen.add(key)
            kind = self.unsigned(4, f"type of {key!r}")
            if key == "general.alignment" and kind != _UINT32:
                raise self.fail(f"general.alignment has the type {kind}, expected {_UINT32}")
            yield key, self.value(kind, key, 0)

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self.text(repr(key), MAX_STRING)
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        if kind not in _NUMBERS:
            raise self.fail(f"{key!r} has the unknown type {kind}, expected 0 to 12")
        self.charge(_OBJECT_COST, repr(key))
        number = self.numbers(kind, 1, key)[0]
        return bool(number) if kind == _BOOL else number.item()

    def numbers(self, kind: int, count: int, key: str) -> NDArray[Any]:
        dtype = np.dtype(self.order + _NUMBERS[kind])
        nbytes = count * dtype.itemsize
        start = self.take(nbytes, repr(key))
        values: NDArray[Any] = np.frombuffer(self.buffer[start : start + nbytes], dtype)
        if kind == _BOOL:
            return values.astype(np.bool_)
        return values.astype(dtype.newbyteorder("="), copy=False)

    def array(self, key: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            raise self.fail(f"{key!r} is an array nested more than {MAX_ARRAY_DEPTH} deep")
        kind = self.unsigned(4, f"element type of {key!r}")
        count = self.unsigned(8, f"length of {key!r}")
        if kind in _NUMBERS:
            itemsize = int(_NUMBERS[kind][1])
            self.check_count(count, itemsize, f"length of {key!r}")
            self.charge(count * itemsize + _ARRAY_COST, repr(key))
            return self.numbers(kind, count, key)
        if kind == _STRING:
            self.check_count(count, 8, f"length of {key!r}")
            self.charge(count * _OBJECT_COST, repr(key))
            return self.strings(count, key)
        if kind == _ARRAY:
            self.check_count(count, 12, f"length of {key!r}")
            self.charge(count * _ARRAY_COST, repr(key))
            return [self.array(key, depth + 1) for _ in range(count)]
        raise self.fail(f"{key!r} is an array of the unknown type {kind}, expected 0 to 12")

    def strings(self, count: int, key: str) -> list[str]:
        if count and self.order == "<":
            # Tokens take 16 bytes on average, including their lengths.
            self.fetch(min(self.position + 32 * count, self.file.size))
            raw = np.frombuffer(self.buffer, np.uint8)[self.position :]
            short = short_strings(raw, count)
            if short is not None:
                self.position += short[1]
                self.charge(short[1], repr(key))
                return short[0]
        # The rest is still a hot loop: everything local, one struct call and one decode each.
        # NUL is allowed here: U+0000 is a legitimate token of some vocabularies.
        read_length = struct.Struct(f"{self.order}Q").unpack_from
        buffer, size, have = self.buffer, self.file.size, len(self.buffer)
        start = position = self.position
        values: list[str] = []
        append = values.append
        try:
            for _ in range(count):
                if position + 8 > have:
                    have = self.fetch(min(position + 8, size))
                    buffer = self.buffer
                end = position + 8 + read_length(buffer, position)[0]
                if end > have:
                    if end > size:
                        raise self.fail(
                            f"string {len(values)} of {key!r} ends at byte {end}, the file has "
                            f"{size}"
                        )
                    have = self.fetch(end)
                    buffer = self.buffer
                append(buffer[position + 8 : end].decode("utf-8"))
                position = end
        except struct.error:
            raise self.fail(f"string {len(values)} of {key!r} starts past the file's end") from None
        except UnicodeDecodeError as error:
            raise self.fail(f"string {len(values)} of {key!r} is not UTF-8: {error}") from None
        self.position = position
        self.charge(position - start, repr(key))
        return values

    # -- tensors -------------------------------------------------------------------------------

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
            raise self.fail(
                f"general.alignment is {value}, expected a power of two up to {MAX_ALIGNMENT}"
            )
        return int(value)

    def tensors(self, metadata: dict[str, Any], shard: int) -> Iterator[GgufTensor]:
        alignment = self.alignment(metadata)
        described = [self.description(index) for index in range(self.num_tensors)]
        data_start = -(-self.position // alignment) * alignment
        expected, last = 0, ""
        seen: set[str] = set()
        for name, shape, kind, offset in described:
            if name in seen:
                raise self.fail(f"tensor {name!r} occurs twice")
            seen.add(name)
            if offset != expected and last == "I2_S":
                raise UnsupportedError(
                    f"{self.file.path}: the tensor before {name!r} has the type 36, of "
                    f"{offset - expected} bytes more than I2_S has: IQ4_NL_4_4, which {_REMOVED}"
                )
            if offset != expected:
                raise self.fail(
                    f"tensor {name!r} is at offset {offset}, expected {expected}: "
                    "tensors must follow one another without gap or overlap"
                )
            nbytes = math.prod(shape) // kind.elements * kind.nbytes + kind.tail
            start = data_start + offset
            if start + nbytes > self.file.size:
                raise self.fail(
                    f"tensor {name!r} ends at byte {start + nbytes}, the file has "
                    f"{self.file.size}: it is truncated"
                )
            expected = -(-(offset + nbytes) // alignment) * alignment
            last = kind.name
            yield GgufTensor(name, shape, kind, start, nbytes, shard)
        surplus = self.file.size - data_start - expected
        if surplus > 0:
            logger.warning("%s: %d bytes after the last tensor", self.file.path, surplus)

    def description(self, index: int) -> tuple[str, tuple[int, ...], GgufType, int]:
        name = self.text(f"name of tensor {index}", limit=MAX_TENSOR_NAME)
        if not name:
            raise self.fail(f"tensor {index} has an empty name")
        num_dims = self.unsigned(4, f"number of dimensions of {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.fail(f"tensor {name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
        dims = [self.unsigned(8, f"dimension {i} of {name!r}") for i in range(num_dims)]
        if not all(0 < dim < 1 << 63 for dim in dims):
            raise self.fail(f"tensor {name!r} has the dimensions {dims}, expected 1 or more each")
        type_id = self.unsigned(4, f"type of tensor {name!r}")
        if type_id in REMOVED_TYPES:
            raise UnsupportedError(
                f"{self.file.path}: tensor {name!r} has the type {REMOVED_TYPES[type_id]}, which "
                f"{_REMOVED}"
            )
        kind = GGUF_TYPES.get(type_id)
        if kind is None:
            raise self.fail(f"tensor {name!r} has the unknown type {type_id}")
        if dims[0] % kind.elements:
            raise self.fail(
                f"tensor {name!r}: rows of {dims[0]} values, but {kind.name} needs a multiple of "
                f"{kind.elements}"
            )
        offset = self.unsigned(8, f"offset of tensor {name!r}")
        return name, tuple(reversed(dims)), kind, offset
