"""GGUF blocks to runtime layouts: every value exactly as the file defines it.

The legacy types are one scale (and minimum) per 32 values with 4-, 5- or 8-bit codes, which is the
affine formula of `sdk.kernels.layouts`; only the order of the codes differs. ggml puts value j of
a block into the low nibble of byte j and value j + 16 into its high nibble (5-bit types keep the
fifth bits in a word beside); here the codes of a row become one bit stream in the order of the
values. K-quants keep the bytes of their blocks. F32, F16 and BF16 keep their float type.

=====  ==================================  =========================
type   bytes of a block of 32              value j
=====  ==================================  =========================
Q4_0   f16 d, 16 bytes                     d * (q - 8)
Q4_1   f16 d, f16 m, 16 bytes              d * q + m
Q5_0   f16 d, u32 fifth bits, 16 bytes     d * (q - 16)
Q5_1   f16 d, f16 m, u32, 16 bytes         d * q + m
Q8_0   f16 d, 32 signed bytes              d * q
=====  ==================================  =========================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.kernels.layouts import BLOCK_TYPES, Affine, Blocks, Dense, Layout
from sdk.loaders.formats.gguf_types import GgufType
from sdk.quant.errors import CheckpointError, UnsupportedError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Byte offsets of the float16 scales inside one k-quant block.
_K_SCALES = {"q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
Copied = Callable[[int, int], None]
#: Values repacked at a time: keeps the intermediate arrays (a few bytes per value) inside the
#: caches.
_CHUNK = 1 << 19


@dataclass(frozen=True, slots=True)
class _Legacy:
    """One 32-value type: where its parts lie in a block and what is subtracted from a code."""

    bits: int
    zero: int = 0
    has_min: bool = False


_LEGACY = {
    "Q4_0": _Legacy(4, zero=8),
    "Q4_1": _Legacy(4, has_min=True),
    "Q5_0": _Legacy(5, zero=16),
    "Q5_1": _Legacy(5, has_min=True),
    "Q8_0": _Legacy(8),
}

#: The types that run, by their names in GGUF_TYPES.
SUPPORTED_TYPES = (*_FLOATS, *_LEGACY, *(name.upper() for name in BLOCK_TYPES))


def decode_matrix(
    kind: GgufType,
    data: NDArray[np.uint8],
    columns: int,
    source: str,
    copied: Copied = lambda first, nbytes: None,
) -> Layout:
    """The rows of one tensor as a layout.

    Args:
        kind: the type of the tensor.
        data: uint8 ``[rows, bytes per row]``; may be a view of the file.
        columns: values per row.
        source: file and tensor, for errors.
        copied: called with (first byte, bytes) of each part of ``data`` that has been copied, so
            that its pages can be given back while the rest is still to come.

    Returns:
        `Dense` shares memory with ``data`` where its alignment allows; the others never do.

    Raises:
        UnsupportedError: a type that does not run yet.
        CheckpointError: a scale that is not finite.
    """
    shape = (data.shape[0], columns)
    if kind.name in _FLOATS:
        return Dense(_dense(data, _FLOATS[kind.name]))
    if kind.name in _LEGACY:
        return _affine(_LEGACY[kind.name], data, shape, source, copied)
    if kind.name.lower() in BLOCK_TYPES:
        return _blocks(kind, data, shape, source, copied)
    raise UnsupportedError(
        f"{source}: the tensor type {kind.name} is not run yet; take or make a file with "
        f"{', '.join(SUPPORTED_TYPES)}, for example by "
        "`llama-quantize --allow-requantize IN OUT Q4_K_M`"
    )


def _dense(data: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    aligned = data.__array_interface__["data"][0] % dtype.itemsize == 0
    usable = aligned and data.flags.c_contiguous and data.flags.writeable
    return torch.from_numpy(data if usable else data.copy()).view(dtype)


def _affine(
    kind: _Legacy,
    data: NDArray[np.uint8],
    shape: tuple[int, int],
    source: str,
    copied: Copied,
) -> Affine:
    rows, columns = shape
    groups = columns // 32
    blocks = data.reshape(rows, groups, -1)
    codes = np.empty((rows, columns * kind.bits // 8), np.uint8)
    scale = np.empty((rows, groups), np.float16)
    minus = np.empty((rows, groups), np.float16) if kind.has_min else None
    step = max(1, _CHUNK // columns)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = blocks[first:last]
        codes[first:last] = _codes(kind, part).reshape(last - first, -1)
        scale[first:last] = _halves(part, 0)
        if minus is not None:
            minus[first:last] = -_halves(part, 2)
        copied(first * data.shape[1], (last - first) * data.shape[1])
    for values in (scale, minus):
        if values is not None:
            _check_finite(values, rows, source)
    return Affine(
        shape,
        kind.bits,
        32,
        torch.from_numpy(codes),
        torch.from_numpy(scale),
        zero=kind.zero,
        minus=None if minus is None else torch.from_numpy(minus),
        signed=kind.bits == 8,
    )


def _blocks(
    kind: GgufType,
    data: NDArray[np.uint8],
    shape: tuple[int, int],
    source: str,
    copied: Copied,
) -> Blocks:
    name = kind.name.lower()
    out = np.empty(data.shape, np.uint8)
    step = max(1, _CHUNK // shape[1])
    for first in range(0, shape[0], step):
        part = data[first : first + step]
        out[first : first + step] = part
        copied(first * data.shape[1], part.nbytes)
    blocks = out.reshape(-1, kind.nbytes)
    for offset in _K_SCALES[name]:
        scales = np.ascontiguousarray(blocks[:, offset : offset + 2]).view("<f2")
        _check_finite(scales, shape[0], source)
    return Blocks(shape, name, torch.from_numpy(out))


def _halves(blocks: NDArray[np.uint8], offset: int) -> NDArray[np.float16]:
    """The float16 at byte ``offset`` of every block: ``[rows, groups]``."""
    halves = np.ascontiguousarray(blocks[:, :, offset : offset + 2])
    values: NDArray[np.float16] = halves.view("<f2")[:, :, 0]
    return values


def _codes(kind: _Legacy, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The codes of ``[rows, groups, block bytes]`` as a bit stream ``[rows, groups, 4 * bits]``."""
    if kind.bits == 8:
        return blocks[:, :, 2:]
    quants = blocks[:, :, -16:]
    low, high = quants & 15, quants >> 4
    if kind.bits == 4:
        low = low[:, :, 0::2] | (low[:, :, 1::2] << 4)
        high = high[:, :, 0::2] | (high[:, :, 1::2] << 4)
        return np.concatenate((low, high), axis=2)
    start = 4 if kind.has_min else 2
    words = np.ascontiguousarray(blocks[:, :, start : start + 4])
    fifth = np.unpackbits(words, axis=2, bitorder="little")
    codes = np.concatenate((low, high), axis=2) | (fifth << 4)
    return _pack_5(codes.reshape(*codes.shape[:2], 4, 8)).reshape(*codes.shape[:2], 20)


def _pack_5(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Eight 5-bit codes into five bytes, lowest bit first: ``[..., 8] -> [..., 5]``."""
    c = [codes[..., i] for i in range(8)]
    packed = np.empty((*codes.shape[:-1], 5), np.uint8)
    packed[..., 0] = c[0] | (c[1] << 5)
    packed[..., 1] = (c[1] >> 3) | (c[2] << 2) | (c[3] << 7)
    packed[..., 2] = (c[3] >> 1) | (c[4] << 4)
    packed[..., 3] = (c[4] >> 4) | (c[5] << 1) | (c[6] << 6)
    packed[..., 4] = (c[6] >> 2) | (c[7] << 3)
    return packed


def _check_finite(scales: NDArray[np.float16], rows: int, source: str) -> None:
    finite = np.isfinite(scales)
    if not finite.all():
        index = int(np.argmin(finite.reshape(-1)))
        row = index // (scales.size // rows)
        raise CheckpointError(
            f"{source}: a scale in row {row} is {scales.reshape(-1)[index]}, "
            "expected a finite number"
        )
