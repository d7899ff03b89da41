"""GGUF's 1-, 2- and 4-bit types whose codes become one bit stream per row.

The values equal those of the file, bit for bit. Sizes are equal too, except for TQ1_0: its five
codes per byte become 2 bits each, 2.06 bits per weight instead of 1.69. Source: ggml-common.h and
the decoders of ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import E2M1, ActivationScheme, Affine

_Bytes = NDArray[np.uint8]


def _stream(codes: _Bytes) -> Tensor:
    """``[rows, ...]`` -> ``[rows, bytes]``."""
    return torch.from_numpy(np.ascontiguousarray(codes).reshape(len(codes), -1))


def _halves(scales: _Bytes) -> Tensor:
    return _stream(scales).view(torch.float16)


def _q1_0(blocks: _Bytes, columns: int) -> Affine:
    """A set bit is d, a cleared one -d."""
    shape = (len(blocks), columns)
    codes, scale = _stream(blocks[:, :, 2:]), _halves(blocks[:, :, :2])
    return Affine(shape, 1, 128, codes, scale, table=torch.tensor([-1.0, 1.0]), name="q1_0")


def _q2_0(blocks: _Bytes, columns: int) -> Affine:
    shape = (len(blocks), columns)
    codes, scale = _stream(blocks[:, :, 2:]), _halves(blocks[:, :, :2])
    return Affine(shape, 2, 64, codes, scale, zero=1, name="q2_0")


def _fours(codes: _Bytes) -> _Bytes:
    """The four 2-bit codes of each byte."""
    words = np.ascontiguousarray(codes).view("<u4")
    packed: _Bytes = (words | words >> 6 | words >> 12 | words >> 18).astype(np.uint8)
    return packed


def _tq1_0(blocks: _Bytes, columns: int) -> Affine:
    """Bytes of five base-3 digits, the first times 81; bytes are fractions of 256, not of 243."""
    rows, count = blocks.shape[:2]
    parts = []
    for first, last, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = (3 ** np.arange(digits)).astype(np.uint8)[:, None]
        rest = blocks[:, :, None, first:last] * powers  # digits before it overflow
        parts.append((rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(rows, count, -1))
    codes = np.concatenate(parts, axis=2)
    scale = _halves(blocks[:, :, 52:])
    return Affine((rows, columns), 2, 256, _stream(_fours(codes)), scale, zero=1, name="tq1_0")


def _tq2_0(blocks: _Bytes, columns: int) -> Affine:
    rows, count = blocks.shape[:2]
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = blocks[:, :, :64].reshape(rows, count, 2, 1, 32) >> shifts & np.uint8(3)
    scale = _halves(blocks[:, :, 64:])
    return Affine((rows, columns), 2, 256, _stream(_fours(codes)), scale, zero=1, name="tq2_0")


def _i2_s(blocks: _Bytes, columns: int) -> Affine:
    """Byte j holds the codes j, 32 + j, 64 + j and 96 + j of its block, the first in its highest
    bits. The factor behind the matrix is still to come."""
    rows, count = blocks.shape[:2]
    shifts = np.array([6, 4, 2, 0], np.uint8)[:, None]
    codes = blocks.reshape(rows, count, 1, 32) >> shifts & np.uint8(3)
    return Affine(
        (rows, columns),
        2,
        columns,
        _stream(_fours(codes)),
        torch.ones((rows, 1)),
        zero=1,
        name="i2_s",
        inputs=ActivationScheme("int", rule="absmax"),
    )


def _nvfp4(blocks: _Bytes, columns: int) -> Affine:
    """Sixteen values in 8 bytes: low halves, then high ones. Scales 0 and 0x7f are zero."""
    rows, count = blocks.shape[:2]
    pairs = np.ascontiguousarray(blocks[:, :, 4:]).view("<u2").reshape(rows, count, 4, 4)
    low = pairs & np.uint16(0xF) | pairs >> 4 & np.uint16(0xF0)
    high = pairs >> 4 & np.uint16(0xF) | pairs >> 8 & np.uint16(0xF0)
    codes = np.concatenate((low, high), axis=3).astype(np.uint8)
    scale = np.ascontiguousarray(blocks[:, :, :4])
    scale[scale == 0x7F] = 0
    return Affine(
        (rows, columns),
        4,
        16,
        _stream(codes),
        _stream(scale).view(torch.float8_e4m3fn),
        table=torch.tensor(E2M1),
        name="nvfp4",
    )


#: Blocks uint8 ``[rows, blocks, bytes]`` and columns -> layout, by the name of the type.
DECODERS: dict[str, Callable[[_Bytes, int], Affine]] = {
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "I2_S": _i2_s,
    "NVFP4": _nvfp4,
}
