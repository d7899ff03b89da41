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
from sdk.bench.shape_parts import RealShape, Tensor, digest
from sdk.kernels.weights.layouts import BLOCK_TYPES

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
    path = folder / f"{name}.{digest(shape)}.{shape.mixture.upper()}.gguf"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    needed = sum(nbytes(tensor, shape.mixture) for tensor in shape.tensors())
    free = shutil.disk_usage(folder).free
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


def nbytes(tensor: Tensor, mixture: str) -> int:
    """Bytes of a tensor in a file of that mixture of types."""
    return math.prod(tensor.shape[:-1]) * _row_bytes(tensor, mixture)


def _row_bytes(tensor: Tensor, mixture: str) -> int:
    columns, kind = tensor.shape[-1], tensor.type(mixture)
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
    mixture = shape.mixture
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{mixture.upper()}"]))
    writer.add_tokenizer_model("no_vocab")
    for tensor in shape.tensors():
        own, size = tensor.type(mixture), nbytes(tensor, mixture)
        kind = gguf.GGMLQuantizationType[own.upper()]
        # of blocks gguf wants the bytes of a row, and computes its numbers
        blocks = (*tensor.shape[:-1], _row_bytes(tensor, mixture))
        rows = tensor.shape if own in ("f16", "f32") else blocks
        dtype = {"f16": np.float16, "f32": np.float32}.get(own, np.uint8)
        writer.add_tensor_info(tensor.name, rows, np.dtype(dtype), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    source = Blocks(mixture)
    with path.open("r+b") as out:
        out.seek(0, os.SEEK_END)
        for tensor in shape.tensors():
            out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
            for part in source.data(tensor):
                out.write(part.data)
        out.write(bytes(-out.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))


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
    """Random contents of tensors of a file in a mixture of types."""

    def __init__(self, mixture: str) -> None:
        self._mixture = mixture
        self._draw = np.random.default_rng(1)
        self._banks: dict[tuple[str, int], NDArray[np.uint8]] = {}

    def data(self, tensor: Tensor) -> Iterator[NDArray[Any]]:
        """The bytes of a tensor, in parts."""
        kind = tensor.type(self._mixture)
        if kind == "f32":
            yield self._values(tensor).astype("<f4")
            return
        if kind == "f16":
            spread = tensor.shape[-1] ** -0.5
            yield (self._draw.standard_normal(tensor.shape, np.float32) * spread).astype("<f2")
            return
        wide = tensor.part.startswith("wide:")
        bank = self._bank(kind, 1 if wide else tensor.shape[-1])
        left, most = nbytes(tensor, self._mixture) // bank.shape[1], _PIECE // bank.shape[1]
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
        if kind == "iq4_xs":
            return _iq4_xs(numbers)
        make = k_blocks if kind in K_QUANTS else one_scale_blocks
        data: NDArray[np.uint8] = make(torch.from_numpy(numbers), kind).data.numpy()
        return data.reshape(_BANK, block.nbytes)


def _iq4_xs(numbers: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of IQ4_XS, ``[n, 136]``: IQ4_NL's scales for 32 numbers, rounded to 6 bits."""
    from sdk.quant.methods.block_search import nearest
    from sdk.quant.methods.gguf_blocks import half, halves, nibbles, one_scale_steps

    groups = numbers.reshape(-1, 8, 32)
    scales = one_scale_steps(numbers.reshape(-1, 32), "iq4_nl", None).scale.reshape(-1, 8)
    d = half(np.abs(scales).max(1, keepdims=True) / 31)
    small = np.rint(scales / d).clip(-32, 31)
    table = np.array(BLOCK_TYPES["iq4_xs"].table, np.float32)
    codes = nearest(groups / (d * np.where(small == 0, 1, small))[:, :, None], table)
    stored = (small + 32).astype(np.uint8)
    high = (stored.astype(np.uint16) >> 4 << 2 * np.arange(8, dtype=np.uint16)).sum(1)
    low = (stored[:, ::2] & 15) | (stored[:, 1::2] & 15) << 4
    packed = nibbles(codes.reshape(-1, 32)).reshape(len(groups), -1)
    parts = (halves(d), high.astype("<u2")[:, None].view(np.uint8), low, packed)
    return np.concatenate(parts, 1)
