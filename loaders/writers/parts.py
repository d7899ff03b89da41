"""Writes tensors as safetensors files: one part at a time during a job, then joined.

A part is a sound safetensors file. It appears under its name when it is complete, so that whoever
finds it may rely on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sdk.loaders.folders.safetensors_reader import SafetensorsFiles
from sdk.quant.errors import CheckpointError

#: Bytes of one file of a folder, as in other writers.
MAX_SHARD = 5 * 10**9
_TYPES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8",
    torch.int8: "I8", torch.int32: "I32", torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
#: Data begin at multiples of this.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PartTensor:
    """A tensor of a part; ``begin`` and ``end`` are offsets in the file."""

    name: str
    type: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def write_part(path: Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write a safetensors file of ``tensors`` with ``notes`` as its metadata.

    :raises OSError: it cannot be written.
    """
    described: dict[str, Any] = {"__metadata__": dict(notes)} if notes else {}
    offset = 0
    for name, tensor in tensors.items():
        described[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    with new_file(path) as out:
        out.write(_header(described))
        for tensor in tensors.values():
            out.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears as ``path`` only when it is complete and on disk; else it is removed.

    A link at ``path`` is replaced, not followed.

    :raises OSError: it cannot be written.
    """
    made = path.with_name(path.name + ".part")
    made.unlink(missing_ok=True)  # of an attempt that was killed
    try:
        with made.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        made.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            made.unlink(missing_ok=True)
        raise


def _header(described: Mapping[str, Any]) -> bytes:
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_parts(paths: Sequence[Path]) -> tuple[list[PartTensor], dict[str, str]]:
    """The tensors of all parts, in order, and all their notes.

    :raises CheckpointError: a part is damaged.
    """
    found: list[PartTensor] = []
    notes: dict[str, str] = {}
    for path in paths:
        with contextlib.closing(SafetensorsFiles([path])) as part:
            notes |= part.metadata
            for name, stored in part.tensors.items():
                end = stored.start + stored.nbytes
                found.append(PartTensor(name, stored.dtype, stored.shape, path, stored.start, end))
    return found, notes


def copy_data(tensor: PartTensor, out: BinaryIO) -> None:
    """Copy the bytes of a tensor into an open file.

    :raises CheckpointError: the part ends before them.
    """
    with tensor.path.open("rb") as source:
        source.seek(tensor.begin)
        left = tensor.nbytes
        while left:
            chunk = source.read(min(left, 1 << 22))
            if not chunk:
                raise CheckpointError(
                    f"{tensor.path}: {tensor.name}: the last {left} bytes are missing: the file is "
                    "truncated"
                )
            out.write(chunk)
            left -= len(chunk)


def join_parts(paths: Sequence[Path], folder: Path, max_shard: int = MAX_SHARD) -> None:
    """Write ``model.safetensors``, or numbered files of up to ``max_shard`` bytes with an index."""
    tensors, _ = read_parts(paths)
    shards: list[list[PartTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else name
        _write_shard(folder / name, shard)
        where.update((tensor.name, name) for tensor in shard)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _write_shard(path: Path, tensors: Sequence[PartTensor]) -> None:
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        described[tensor.name] = {
            "dtype": tensor.type,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    with new_file(path) as out:
        out.write(_header(described))
        for tensor in tensors:
            copy_data(tensor, out)


def free_space(folder: Path) -> int:
    """Free bytes of the disk where ``folder`` is or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
