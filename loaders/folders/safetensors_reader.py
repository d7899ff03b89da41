"""Reads safetensors files: one file, or shards listed by an index.

A file is a u64 header length, a JSON header ``{name: {dtype, shape, data_offsets: [begin, end]}}``
(and optionally ``__metadata__``), then the data, which the offsets must cover without gap or
overlap. The header is parsed here and not by the safetensors library, because the library silently
takes the last of two equal keys, and its exceptions name neither file nor tensor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system.blocks import MemoryBlocks
from sdk.kernels.weights.layouts import PIECE_ROWS, Dense, Layout, Pieces
from sdk.kernels.weights.stored_rows import StoredRows
from sdk.loaders.folders.folder_file import folder_file, weight_file
from sdk.loaders.json_file import parse_json, read_json
from sdk.loaders.model_file import ModelFile
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.spec import QuantSpec
from sdk.quant.unread import UnreadWeight

logger = logging.getLogger("sdk")

#: Headers of real files are below 10 MB; the format allows 100 MB.
MAX_HEADER = 64 << 20
MAX_INDEX = 64 << 20
MAX_RANK = 16
#: Bytes that are compared at a time.
_PIECE = 1 << 20
#: How many pieces of two tensors are compared, and the bytes of one.
_SAMPLES, _SAMPLE = 64, 1 << 16

#: Plain floats, and torch's names of them.
FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Bits per value and the name of torch's type (None: torch has none that fits) by format name.
DTYPES: dict[str, tuple[int, str | None]] = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U64": (64, "uint64"),
    "U32": (32, "uint32"),
    "U16": (16, "uint16"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "C64": (64, "complex64"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "F4": (4, None),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Position and type of one tensor: its bytes are ``file[start : start + nbytes]``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: ModelFile
    start: int
    nbytes: int


#: The tensors of a file, and the strings of its metadata.
ReadHeader = Callable[[ModelFile], tuple[list[StoredTensor], dict[str, str]]]


class SafetensorsFiles:
    """The tensors of one checkpoint, in one or several files, by name.

    ``metadata``: the ``__metadata__`` strings of all headers. ``read_header``: for files of another
    format whose tensors are ranges of the file, too.
    """

    def __init__(self, files: Iterable[Path], read_header: ReadHeader | None = None) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self.metadata: dict[str, str] = {}
        blocks = MemoryBlocks()
        for path in files:
            tensors, metadata = (read_header or _read_header)(ModelFile(path, blocks))
            self.metadata |= metadata
            for tensor in tensors:
                other = self.tensors.get(tensor.name)
                if other is not None:
                    raise CheckpointError(
                        f"{path}: tensor {tensor.name!r} is also in {other.file.path.name}"
                    )
                self.tensors[tensor.name] = tensor

    def tensor(self, name: str, index: int | None = None) -> Tensor:
        """One tensor, or its part ``index`` along the first dimension; each call reads the file.

        Raises:
            CheckpointError: it cannot be read.
            UnsupportedError: torch has no type for its values.
        """
        stored = self.tensors[name]
        dtype = getattr(torch, DTYPES[stored.dtype][1] or "", None)
        if dtype is None:
            raise UnsupportedError(
                f"{stored.file.path}: tensor {name!r} holds {stored.dtype}, which this version of "
                "torch does not support; use a checkpoint in F32, F16 or BF16"
            )
        shape, start, nbytes = stored.shape, stored.start, stored.nbytes
        if index is not None and (not shape or index >= shape[0]):
            raise CheckpointError(
                f"{stored.file.path}: tensor {name!r}: shape {list(shape)}, expected more than "
                f"{index} parts along its first dimension"
            )
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)[... if index is None else index]
        if index is not None:
            nbytes //= shape[0]
            shape, start = shape[1:], start + index * nbytes
        return torch.from_numpy(stored.file.read(start, nbytes)).view(dtype).reshape(shape)

    def close(self) -> None:
        """Close the files; tensors already read stay valid. Idempotent."""
        for file in {stored.file for stored in self.tensors.values()}:
            file.close()


def is_large(stored: StoredTensor) -> bool:
    """Whether a tensor is a matrix of plain floats that is worth reading in pieces."""
    return stored.dtype in FLOAT_TYPES and len(stored.shape) == 2 and stored.nbytes > _PIECE


def bytes_at_once(stored: StoredTensor) -> int:
    """The bytes of a matrix that :func:`unread` reads at a time."""
    width = max(stored.nbytes // stored.shape[0], 1)
    return max(_PIECE // width // PIECE_ROWS, 1) * PIECE_ROWS * width


def entry_of(stored: StoredTensor, *, whole: bool) -> TensorEntry:
    """``whole``: it is not read in pieces, even if it is large."""
    found = TensorEntry(stored.name, stored.shape, stored.dtype, stored.nbytes)
    if whole or not is_large(stored):
        return found
    return replace(found, read=2 * bytes_at_once(stored))  # while packed, and the next ones


def unread(stored: StoredTensor) -> UnreadWeight:
    """A matrix of plain floats that is read when it is bound, or never: its rows may stay there."""
    rows, columns = stored.shape
    kind = FLOAT_TYPES[stored.dtype]
    width = stored.nbytes // rows

    def read(start: int, count: int) -> Layout:
        data = stored.file.read(stored.start + start * width, count * width)
        return Dense(torch.from_numpy(data).view(getattr(torch, kind)).reshape(count, columns))

    step = bytes_at_once(stored) // width
    spec = QuantSpec.parse(stored.dtype.lower())
    where = StoredRows((rows, columns), kind, stored.file.descriptor, stored.start, width)
    return UnreadWeight(Pieces((rows, columns), read, step), spec, where)


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same values of the same type; reads until they differ."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for start in range(0, one.nbytes, _PIECE):
        size = min(_PIECE, one.nbytes - start)
        parts = [each.file.read(each.start + start, size).tobytes() for each in (one, other)]
        if parts[0] != parts[1]:
            return False
    return True


def alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors hold the same values as far as 64 pieces show, spread over them: 4 MiB
    instead of gigabytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    step = max(one.nbytes // _SAMPLES, _SAMPLE)
    for start in range(0, one.nbytes, step):
        size = min(_SAMPLE, one.nbytes - start)
        parts = [each.file.read(each.start + start, size).tobytes() for each in (one, other)]
        if parts[0] != parts[1]:
            return False
    return True


def _read_header(file: ModelFile) -> tuple[list[StoredTensor], dict[str, str]]:
    path = file.path
    if file.size < 8:
        raise CheckpointError(f"{path}: {file.size} bytes are too few for a safetensors header")
    length = int.from_bytes(file.read(0, 8).data, "little")
    if length > min(file.size - 8, MAX_HEADER):
        raise CheckpointError(
            f"{path}: header length {length}, the file has {file.size - 8} bytes after it "
            f"and at most {MAX_HEADER} are allowed"
        )
    header = parse_json(file.read(8, length).tobytes(), f"{path} (header)")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to strings")
    data_start = 8 + length
    tensors = [_tensor(file, name, entry, data_start) for name, entry in header.items()]
    end = data_start
    for tensor in sorted(tensors, key=lambda t: (t.start, t.nbytes)):
        if tensor.start != end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} begins at byte {tensor.start - data_start} of the "
                f"data, expected {end - data_start}: tensors must leave no gap and not overlap"
            )
        end += tensor.nbytes
    if end != file.size:
        raise CheckpointError(
            f"{path}: the tensors end at byte {end}, the file has {file.size}: "
            + ("it is truncated" if end > file.size else "there are bytes after the last tensor")
        )
    return tensors, metadata


def _tensor(file: ModelFile, name: str, entry: Any, data_start: int) -> StoredTensor:
    def fail(what: str) -> CheckpointError:
        return CheckpointError(f"{file.path}: tensor {name!r}: {what}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fail(f"expected dtype, shape and data_offsets, found {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise fail(f"unknown dtype {dtype!r}")
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        raise fail(f"shape {str(shape)[:80]} is not a list of at most {MAX_RANK} sizes")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fail(f"data_offsets {str(offsets)[:80]} are not [begin, end]")
    begin, end = offsets
    bits = math.prod(shape) * DTYPES[dtype][0]
    if bits != (end - begin) * 8:
        raise fail(
            f"{dtype} of shape {shape} takes {bits / 8:g} bytes, data_offsets give {end - begin}"
        )
    return StoredTensor(name, dtype, tuple(shape), file, data_start + begin, end - begin)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def read_index(index: Path, folder: Path) -> SafetensorsFiles:
    """Open the shards named by a ``model.safetensors.index.json``.

    Raises:
        CheckpointError: a shard is missing or lies outside ``folder``, a tensor is in two shards,
        or
            the index and the shards disagree about which tensor is where.
    """
    document = read_json(folder_file(folder, index.name) or index, MAX_INDEX)
    places = document.get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name, shard in places.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            raise CheckpointError(
                f"{index}: tensor {name!r} is listed in {shard!r}, which is not the plain name "
                "of a .safetensors file in the same folder"
            )
    shards = sorted(set(places.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(f"{index}: shards are missing: {', '.join(missing[:5])}")
    files = SafetensorsFiles(weight_file(folder, shard) for shard in shards)
    for name, shard in places.items():
        stored = files.tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"{folder / shard}: has no tensor {name!r}, which the index lists"
            )
        if stored.file.path.name != shard:
            raise CheckpointError(
                f"{index}: tensor {name!r} is listed in {shard}, found in {stored.file.path.name}"
            )
    extra = sorted(files.tensors.keys() - places.keys())
    if extra:
        logger.warning("%s does not list %d tensors, such as %r", index, len(extra), extra[0])
    return files


def _is_plain(name: str) -> bool:
    plain = PurePosixPath(name).name == name and "\\" not in name and "\0" not in name
    return plain and name.endswith(".safetensors")
