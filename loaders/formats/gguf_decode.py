"""GGUF tensors to kernel layouts: every value exactly as the file defines it.

Most quantized types keep their blocks byte for byte, and F32, F16 and BF16 keep their type. Both
are views of the bytes read if the alignment allows, so that nothing is copied before a kernel packs
them. `gguf_repack` and `gguf_codebooks` convert the others to a layout that kernels support.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks, Dense, Layout
from sdk.loaders.formats import gguf_codebooks, gguf_repack
from sdk.loaders.formats.gguf_types import GgufType
from sdk.quant.errors import CheckpointError

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NUMBERS = {"F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
_REPACKED = {**gguf_repack.DECODERS, **gguf_codebooks.DECODERS}
#: Bytes of the file unpacked at a time; that takes another 60 MB or so, mostly indices.
_STRETCH = 2 << 20


def decode_matrix(
    kind: GgufType,
    data: NDArray[np.uint8],
    columns: int,
    source: str,
    first: int = 0,
    factor: float | None = None,
) -> Layout:
    """The rows of one tensor, from row ``first`` on, as a layout.

    Args:
        kind: the type of the tensor.
        data: uint8 ``[rows, bytes per row]``; may be a view of the file.
        columns: values per row.
        source: file and tensor, for errors.
        factor: of all weights, if the type has a tail (:class:`GgufType`).

    Returns:
        A layout, which shares memory with ``data`` if no conversion is needed. Integers and F64
        become float32; F64 is rounded.

    Raises:
        CheckpointError: a scale is not finite, a code is none of the type's, or float32 cannot hold
            an integer; a type with a tail where none is read.
    """
    if kind.name in FLOATS:
        return Dense(_dense(data, getattr(torch, FLOATS[kind.name])))
    if kind.name in _NUMBERS:
        return Dense(_as_float32(data, kind, source))
    blocks = data.reshape(data.shape[0], -1, kind.nbytes)
    for offset in kind.halves:
        _check_finite(blocks[:, :, offset : offset + 2], source, first)
    if kind.name == "IQ1_M":
        _check_finite(gguf_codebooks.iq1_m_scale(blocks), source, first)
    if kind.name in ("MXFP4", "NVFP4"):
        _check_bytes(blocks, kind, source, first)
    if kind.tail:
        return _times(factor, _in_stretches(_REPACKED[kind.name], blocks, columns), kind, source)
    if kind.name in _REPACKED:
        return _in_stretches(_REPACKED[kind.name], blocks, columns)
    name = kind.name.lower()
    assert name in BLOCK_TYPES, name
    writable = data if data.flags.writeable else data.copy()
    return Blocks((data.shape[0], columns), name, torch.from_numpy(writable))


def _times(factor: float | None, layout: Affine, kind: GgufType, source: str) -> Affine:
    """I2_S, whose codes are 0 to 2."""
    codes = layout.codes.numpy()
    if (codes & codes >> 1 & 0x55).any():
        raise CheckpointError(f"{source}: a code of {kind.name} is 3, expected 0 to 2")
    if factor is None or not math.isfinite(factor):
        raise CheckpointError(
            f"{source}: {kind.name}: expected a matrix with a finite factor behind it, found "
            f"{'none' if factor is None else factor}"
        )
    return replace(layout, scale=layout.scale * factor)


def _in_stretches(
    decoder: Callable[[NDArray[np.uint8], int], Affine], blocks: NDArray[np.uint8], columns: int
) -> Affine:
    """Some rows at a time: for an embedding, the indices alone would take more than its codes."""
    total = len(blocks)
    rows = max(_STRETCH // blocks[0].nbytes, 1)
    first = decoder(blocks[:rows], columns)
    if rows >= total:
        return first
    codes, scale, supers = (
        None if part is None else torch.empty((total, part.shape[1]), dtype=part.dtype)
        for part in (first.codes, first.scale, first.super_scale)
    )
    assert codes is not None and scale is not None
    whole = replace(first, shape=(total, columns), codes=codes, scale=scale, super_scale=supers)
    for start in range(0, total, rows):
        part = decoder(blocks[start : start + rows], columns) if start else first
        for to, some in (
            (codes, part.codes),
            (scale, part.scale),
            (supers, part.super_scale),
        ):
            if to is not None and some is not None:  # numpy: torch would start its threads for this
                to.view(torch.uint8).numpy()[start : start + rows] = some.view(torch.uint8).numpy()
    return whole


def _dense(data: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    aligned = data.__array_interface__["data"][0] % dtype.itemsize == 0
    usable = aligned and data.flags.c_contiguous and data.flags.writeable
    return torch.from_numpy(data if usable else data.copy()).view(dtype)


def _as_float32(data: NDArray[np.uint8], kind: GgufType, source: str) -> Tensor:
    values = np.ascontiguousarray(data).view(_NUMBERS[kind.name])
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if kind.name != "F64" and not np.array_equal(rounded.astype(np.float64), values):
        raise CheckpointError(f"{source}: expected integers that float32 holds, found larger ones")
    return torch.from_numpy(rounded)


def _check_finite(halves: NDArray[np.uint8], source: str, first: int) -> None:
    """Check the float16 scales of all blocks, given as bytes ``[rows, blocks, 2]``."""
    exponents = halves[:, :, 1] & 0x7C  # little-endian; all ones: infinite or not a number
    if not exponents.size or exponents.max() < 0x7C:
        return
    row, at = np.argwhere(exponents == 0x7C)[0]
    found = halves[row, at].copy().view("<f2")[0]
    raise CheckpointError(
        f"{source}: a scale in row {first + row} is {found}, expected a finite number"
    )


def _check_bytes(blocks: NDArray[np.uint8], kind: GgufType, source: str, first: int) -> None:
    """Check scales of one byte: MXFP4 allows no 255 (not a number), NVFP4 no sign."""
    scales, limit = (blocks[:, :, :1], 254) if kind.name == "MXFP4" else (blocks[:, :, :4], 127)
    if not scales.size or scales.max() <= limit:
        return
    row, at, part = np.argwhere(scales > limit)[0]
    raise CheckpointError(
        f"{source}: a scale in row {first + row} is the byte {scales[row, at, part]}, "
        f"expected 0 to {limit} ({kind.name})"
    )
