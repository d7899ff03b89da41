"""Codes as bit streams, lowest bit first, as GPTQ, AWQ and others pack them into words.

Everything is numpy, a few rows at a time, so that temporaries fit the caches. A matrix of
4096 x 4096 takes 2 to 6 ms if words are only transposed, 30 to 50 ms if columns are sorted, 55 to
90 ms if codes are stored in planes. torch would use its OpenMP threads (quant/join.py).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch, type_name

Bytes = NDArray[np.uint8]

#: Rows unpacked at a time.
_ROWS = 64
#: Widths of the planes into which a code is split, lowest bits first.
_PLANES = {
    2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,),
}  # fmt: skip
#: An integer type of the same size, and the exponent bits that are all set in infinities and NaN.
_EXPONENT = {
    "float16": ("int16", 0x7C00),
    "bfloat16": ("int16", 0x7F80),
    "float32": ("int32", 0x7F800000),
}


def turned(words: Tensor) -> Bytes:
    """Words ``[R, N]`` -> the bytes of each column, uint8 ``[N, R * bytes of a word]``."""
    source = words.numpy()
    out = np.empty(source.shape[::-1], source.dtype)
    for start in range(0, len(source), 16):  # four times as fast as all rows at once
        out[:, start : start + 16] = source[start : start + 16].T
    return out.view(np.uint8)


def turned_floats(values: Tensor) -> Tensor:
    """``[G, N] -> [N, G]``, contiguous, any float type."""
    integers = getattr(torch, _EXPONENT[type_name(values.dtype)][0])
    return torch.from_numpy(np.ascontiguousarray(values.view(integers).numpy().T)).view(
        values.dtype
    )


def all_finite(values: Tensor) -> bool:
    """Whether all values are finite."""
    name, exponent = _EXPONENT[type_name(values.dtype)]
    integers = getattr(torch, name)
    return not bool(((values.view(integers).numpy() & exponent) == exponent).any())


def unpacked(streams: Bytes, bits: int, count: int) -> Bytes:
    """Rows of bit streams, uint8 ``[M, bytes]`` -> their first ``count`` codes, ``[M, count]``."""
    rows, eights = len(streams), -(-count // 8)
    kind = np.dtype("<u4" if bits <= 4 else "<u8")
    padded = np.zeros((rows, eights, kind.itemsize), np.uint8)
    whole = min(streams.shape[1] // bits, eights)
    padded[:, :whole, :bits] = streams[:, : whole * bits].reshape(rows, whole, bits)
    if whole < eights:
        rest = streams[:, whole * bits : eights * bits]
        padded[:, whole, : rest.shape[1]] = rest
    words = padded.view(kind)[:, :, 0]
    codes = np.empty((rows, eights, 8), np.uint8)
    for i in range(8):
        codes[:, :, i] = (words >> kind.type(bits * i)) & kind.type((1 << bits) - 1)
    return codes.reshape(rows, -1)[:, :count]


def packed(codes: Bytes, bits: int) -> Bytes:
    """The inverse of :func:`unpacked`: uint8 ``[M, ceil(count * bits / 8)]``."""
    rows, count = codes.shape
    if count % 8:
        codes = np.pad(codes, ((0, 0), (0, -count % 8)))
    kind = np.dtype("<u4" if bits <= 4 else "<u8")
    eights = codes.reshape(rows, -1, 8)
    words = np.zeros(eights.shape[:2], kind)
    for i in range(8):
        words |= eights[:, :, i].astype(kind) << kind.type(bits * i)
    stream = words.view(np.uint8).reshape(rows, -1, kind.itemsize)[:, :, :bits]
    return stream.reshape(rows, -1)[:, : -(-count * bits // 8)]


def packed_matrix(codes: Bytes, bits: int) -> Bytes:
    """:func:`packed` for whole matrices, some rows at a time."""
    return codes if bits == 8 else _by_rows(codes, lambda rows: packed(rows, bits))


def in_order(streams: Bytes, bits: int, order: NDArray[np.intp]) -> Bytes:
    """Reordered codes: the ``j``-th of a row was its ``order[j]``-th."""
    return _by_rows(
        streams,
        lambda rows: packed(np.take(unpacked(rows, bits, len(order)), order, axis=1), bits),
    )


def without_planes(streams: Bytes, bits: int) -> Bytes:
    """Streams of whole codes from streams whose codes are split into planes, 32 codes at a time.

    ``bits * 4`` bytes hold 32 codes: their lowest bits as a stream, then the higher ones; see
    ``_PLANES``. The bytes of a row must be a multiple of that.
    """
    if len(_PLANES[bits]) == 1:
        return streams

    def joined(rows: Bytes) -> Bytes:
        blocks = rows.reshape(-1, bits * 4)
        codes = np.zeros((len(blocks), 32), np.uint8)
        byte = shift = 0
        for width in _PLANES[bits]:
            codes |= unpacked(blocks[:, byte : byte + 4 * width], width, 32) << shift
            byte, shift = byte + 4 * width, shift + width
        return packed(codes, bits).reshape(rows.shape)

    return _by_rows(streams, joined)


def _by_rows(streams: Bytes, change: Callable[[Bytes], Bytes]) -> Bytes:
    parts = [change(streams[i : i + _ROWS]) for i in range(0, len(streams), _ROWS)]
    return np.concatenate(parts)
