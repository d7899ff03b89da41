"""Writes the files of :mod:`sdk.bench.real_shapes`, once, into the user's cache."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError
from sdk.api.machine import cache_folder
from sdk.api.sizes import format_bytes
from sdk.bench.real_shapes import RealShape, Tensor, digest
from sdk.kernels.layouts import BLOCK_TYPES

if TYPE_CHECKING:
    import gguf

#: Blocks of a bank: 200,000 numbers, quantized in about a second.
_BANK = 768
#: Bytes that are written at a time.
_PIECE = 16 << 20


def cached_file(name: str, shape: RealShape, folder: Path | None = None) -> Path:
    """The file of ``shape`` in ``folder`` (default: in the user's cache), written if it is missing.

    It appears once it is complete.

    :raises RequestError: there is too little room for it.
    """
    folder = folder or cache_folder() / "bench"
    path = folder / f"{name}.{digest(shape)}.Q4_K_M.gguf"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(nbytes(tensor) for tensor in shape.tensors()), shutil.disk_usage(folder).free
    if free < needed + (64 << 20):
        raise RequestError(
            f"{name}: expected {format_bytes(needed)} of free space in {folder}, found "
            f"{format_bytes(free)}; set XDG_CACHE_HOME to a folder on another disk"
        )
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        write_shape(unfinished, name, shape)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor in the file."""
    return math.prod(tensor.shape[:-1]) * _row_bytes(tensor)


def _row_bytes(tensor: Tensor) -> int:
    columns, kind = tensor.shape[-1], tensor.type
    if kind in ("f16", "f32"):
        return columns * (2 if kind == "f16" else 4)
    block = BLOCK_TYPES[kind]
    return columns // block.elements * block.nbytes


def write_shape(path: Path, name: str, shape: RealShape) -> None:
    """Write the same bytes every time, tensor by tensor: a file may be larger than the memory."""
    import gguf

    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(name)
    for key, value in shape.metadata().items():
        _add(writer, f"{shape.architecture}.{key}", value)
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_K_M))
    writer.add_tokenizer_model("no_vocab")
    for tensor in shape.tensors():
        kind = gguf.GGMLQuantizationType[tensor.type.upper()]
        # of blocks gguf wants the bytes of a row, and computes its numbers
        rows = tensor.shape if tensor.type in ("f16", "f32") else _bytes_shape(tensor)
        dtype = {"f16": np.float16, "f32": np.float32}.get(tensor.type, np.uint8)
        writer.add_tensor_info(tensor.name, rows, np.dtype(dtype), nbytes(tensor), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    source = Blocks()
    with path.open("r+b") as out:
        out.seek(0, os.SEEK_END)
        for tensor in shape.tensors():
            out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            for part in source.data(tensor):
                out.write(part.data)
        out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


def _bytes_shape(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape[:-1], _row_bytes(tensor))


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


class Blocks:
    """Random contents of tensors."""

    def __init__(self) -> None:
        self._draw = np.random.default_rng(1)
        self._banks: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def data(self, tensor: Tensor) -> Iterator[NDArray[Any]]:
        """The bytes of a tensor, in parts."""
        if tensor.type == "f32":
            yield self._values(tensor).astype("<f4")
            return
        if tensor.type == "f16":
            spread = tensor.shape[-1] ** -0.5
            yield (self._draw.standard_normal(tensor.shape, np.float32) * spread).astype("<f2")
            return
        wide = tensor.part.startswith("wide:")
        bank = self._bank(tensor.type, 1 if wide else tensor.shape[-1])
        left, most = nbytes(tensor) // bank.shape[1], _PIECE // bank.shape[1]
        while left:
            count = min(left, most)
            yield bank[self._draw.integers(0, len(bank), count)]
            left -= count

    def _values(self, tensor: Tensor) -> NDArray[np.floating[Any]]:
        shape, draw = tensor.shape, self._draw
        if tensor.part == "ones":
            return np.ones(shape)
        if tensor.part == "rope":  # a quarter of the pairs turns
            return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30)
        if tensor.part == "decays":
            return -draw.uniform(1, 16, shape)
        if tensor.part == "steps":  # of which softplus makes 0.001 to 0.1, evenly by magnitude
            steps = np.exp(draw.uniform(np.log(1e-3), np.log(0.1), shape))
            return np.asarray(np.log(np.expm1(steps)))
        normal = draw.standard_normal(shape) / math.sqrt(shape[-1])
        if tensor.part == "skewed":  # longer rows win more often
            return normal * np.exp(0.5 * draw.standard_normal((shape[0], 1)))
        return normal

    def _bank(self, kind: str, columns: int) -> NDArray[np.uint8]:
        """Blocks ``[n, bytes]`` of normal numbers of variance 1 / columns."""
        found = self._banks.get((kind, columns))
        if found is None:
            found = self._banks[kind, columns] = self._quantized(kind, columns**-0.5)
        return found

    def _quantized(self, kind: str, spread: float) -> NDArray[np.uint8]:
        import torch

        from sdk.quant.methods.gguf_blocks import one_scale_blocks
        from sdk.quant.methods.k_quants import K_QUANTS, k_blocks

        block = BLOCK_TYPES[kind]
        numbers = self._draw.standard_normal((_BANK, block.elements), np.float32) * spread
        make = k_blocks if kind in K_QUANTS else one_scale_blocks
        data: NDArray[np.uint8] = make(torch.from_numpy(numbers), kind).data.numpy()
        return data.reshape(_BANK, block.nbytes)
