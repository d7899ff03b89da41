"""Reads GGUF models: metadata, tensors and their bytes, from one file or several.

A model may be split into files named ``<prefix>-00001-of-00003.gguf``. It is opened by the first
one, which holds all metadata. `header.py` describes the contents of a file.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.system.blocks import MemoryBlocks
from sdk.kernels.weights.stored_rows import StoredRows
from sdk.loaders.formats.gguf_byte_order import to_little_endian
from sdk.loaders.gguf_files.header import GgufHeader, GgufTensor
from sdk.loaders.model_file import ModelFile
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError

MAX_SHARDS = 1024
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Bytes of two matrices that are compared at a time.
_COMPARED = 2**20
#: Rows of two matrices that are compared where a mistake costs little.
_SAMPLES = 64
_SPLIT_NAME = re.compile(r"^(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


class GgufFile:
    """One GGUF model.

    ``metadata`` maps keys to bool, int, float, str, numpy arrays of numbers and lists of str.
    """

    def __init__(self, path: Path, metadata: dict[str, Any], shards: list[_Shard]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors: dict[str, GgufTensor] = {}
        self._shards = shards
        for shard in shards:
            for tensor in shard.tensors:
                if tensor.name in self.tensors:
                    first = shards[self.tensors[tensor.name].shard].file.path.name
                    raise CheckpointError(
                        f"{shard.file.path}: tensor {tensor.name!r} is also in {first}"
                    )
                self.tensors[tensor.name] = tensor

    def data(
        self, name: str, expert: int | None = None, part: tuple[int, int] | None = None
    ) -> NDArray[np.uint8]:
        """The little-endian bytes of a tensor, uint8 ``[rows, bytes per row]``.

        ``expert``: read only this expert of a tensor of all experts. ``part``: read only this many
        rows from this one on.

        Raises:
            CheckpointError: the bytes cannot be read.
            UnsupportedError: the type has no defined big-endian form.
        """
        tensor = self.tensors[name]
        shard = self._shards[tensor.shard]
        shape, start, nbytes = tensor.shape, tensor.start, tensor.nbytes - tensor.type.tail
        if expert is not None:
            if expert >= shape[0]:
                raise CheckpointError(
                    f"{shard.file.path}: tensor {name!r}: shape {list(shape)}, expected more than "
                    f"{expert} experts"
                )
            nbytes //= shape[0]
            shape, start = shape[1:], start + expert * nbytes
        rows = math.prod(shape[:-1])
        width = nbytes // rows
        first, rows = part or (0, rows)
        data = shard.file.read(start + first * width, rows * width).reshape(rows, width)
        if not shard.big_endian:
            return data
        return to_little_endian(tensor.type, data, f"{shard.file.path}: tensor {name!r}")

    def factor(self, name: str) -> float:
        """What all weights of a tensor are multiplied by, whose type has a tail.

        :raises CheckpointError: the bytes cannot be read.
        """
        tensor = self.tensors[name]
        shard = self._shards[tensor.shard]
        tail = shard.file.read(tensor.start + tensor.nbytes - tensor.type.tail, 4)
        return float(tail.view(">f4" if shard.big_endian else "<f4")[0])

    def stored_rows(self, name: str) -> StoredRows | None:
        """Where the rows of a matrix are; ``None`` if kernels cannot read them as they are."""
        tensor = self.tensors[name]
        shard, kind = self._shards[tensor.shard], tensor.type.name
        if shard.big_endian or len(tensor.shape) != 2:
            return None
        rows, columns = tensor.shape
        return StoredRows(
            (rows, columns),
            _FLOATS.get(kind, kind.lower()),
            shard.file.descriptor,
            tensor.start,
            tensor.nbytes // rows,
        )

    def leave_out_equal_head(self) -> None:
        """Forget ``output.weight`` if its bits are those of the embedding, as if the file had left
        it out: then both are one matrix in memory.

        Where they differ, which nearly always shows at once, a few rows are read; else both.

        :raises CheckpointError: the bytes cannot be read.
        """
        embedding, head = (self.tensors.get(f"{name}.weight") for name in ("token_embd", "output"))
        beside = re.compile(r"(output|token_embd)\.(?!weight$)")  # such as a factor of one of them
        if embedding is None or head is None or any(map(beside.match, self.tensors)):
            return
        if (embedding.type, embedding.shape) != (head.type, head.shape) or head.type.tail:
            return
        rows = math.prod(head.shape[:-1])
        step = max(1, _COMPARED // max(head.nbytes // rows, 1))
        for first in range(0, rows, step):
            part = first, min(step, rows - first)
            one, other = (self.data(tensor.name, part=part) for tensor in (embedding, head))
            if not np.array_equal(one, other):
                return
        del self.tensors["output.weight"]

    def alike(self, one: GgufTensor, other: GgufTensor) -> bool:
        """Whether two tensors hold the same blocks as far as 64 of their rows show."""
        if (one.type, one.shape) != (other.type, other.shape):
            return False
        if one.type.tail and self.factor(one.name) != self.factor(other.name):
            return False
        rows = math.prod(one.shape[:-1])
        parts = ((row, 1) for row in range(0, rows, max(1, rows // _SAMPLES)))
        return all(
            np.array_equal(self.data(one.name, part=part), self.data(other.name, part=part))
            for part in parts
        )

    def entries(self) -> list[TensorEntry]:
        """See :meth:`sdk.quant.checkpoint.Checkpoint.entries`."""
        return [
            TensorEntry(tensor.name, tensor.shape, tensor.type.name, tensor.nbytes, _held(tensor))
            for tensor in self.tensors.values()
        ]

    def close(self) -> None:
        """Close the files; data already read stays valid. Idempotent."""
        for shard in self._shards:
            shard.file.close()


def _held(tensor: GgufTensor) -> int | None:
    kind = tensor.type
    if kind.tail:  # the factor becomes one of each row
        return tensor.nbytes - kind.tail + 4 * math.prod(tensor.shape[:-1])
    return tensor.nbytes // kind.nbytes * kind.held if kind.held else None


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file, and those of the other parts of a split model.

    Raises:
        CheckpointError: the file is damaged or contradicts itself, or a part is missing.
    """
    blocks = MemoryBlocks()
    first = _Shard(path, 0, blocks)
    count = first.split("count", MAX_SHARDS, default=1)
    number = first.split("no", MAX_SHARDS, default=0)
    if count <= 1:
        return GgufFile(path, first.metadata, [first])
    paths = _shard_paths(path, number, count)
    shards = [first, *(_Shard(part, index, blocks) for index, part in enumerate(paths) if index)]
    for index, shard in enumerate(shards[1:], 1):
        found = (shard.split("no", MAX_SHARDS), shard.split("count", MAX_SHARDS))
        if found != (index, count):
            raise CheckpointError(
                f"{shard.file.path}: split.no and split.count are {found}, "
                f"expected {(index, count)}"
            )
    total = sum(len(shard.tensors) for shard in shards)
    declared = first.split("tensors.count", 1 << 31, default=total)
    if declared != total:
        raise CheckpointError(
            f"{path}: split.tensors.count is {declared}, but the {count} files hold {total} tensors"
        )
    return GgufFile(path, first.metadata, shards)


def _shard_paths(path: Path, number: int, count: int) -> list[Path]:
    match = _SPLIT_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path}: part {number + 1} of {count} of a split model, so its name must end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf"
        )
    paths = [
        path.with_name(f"{match['prefix']}-{index:05d}-of-{count:05d}.gguf")
        for index in range(1, count + 1)
    ]
    if number != 0 or int(match["number"]) != 1:
        raise CheckpointError(
            f"{path}: part {number + 1} of {count} of a split model; open {paths[0].name}"
        )
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise CheckpointError(f"{path}: parts of the split model are missing: {', '.join(missing)}")
    return paths


class _Shard:
    """One file: its metadata and tensors."""

    def __init__(self, path: Path, index: int, blocks: MemoryBlocks) -> None:
        self.file = ModelFile(path, blocks)
        header = GgufHeader(self.file)
        self.big_endian = header.order == ">"
        self.metadata = dict(header.metadata())
        self.tensors = list(header.tensors(self.metadata, index))

    def split(self, key: str, limit: int, default: int = 0) -> int:
        """An integer from the ``split.`` metadata."""
        value = self.metadata.get(f"split.{key}", default)
        if type(value) is not int or not 0 <= value <= limit:
            raise CheckpointError(
                f"{self.file.path}: split.{key} is {str(value)[:80]}, expected 0 to {limit}"
            )
        return value
