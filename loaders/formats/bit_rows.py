"""Rows of small codes: one per byte, or as `Affine` holds them, one bit stream, lowest bit first.

Eight codes of ``b`` bits fill ``b`` bytes, so a row is packed and unpacked through 64-bit words
that hold eight codes each: one way for every width.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

#: Codes handled at a time, which bounds the words in memory to 4 MiB. A 4096 x 4096 matrix takes 25
#: to 45 ms either way (packing 4 bits: 3).
_CHUNK = 1 << 22


def pack_rows(codes: Bytes, bits: int) -> Bytes:
    """Codes ``[N, K]``, each below ``2 ** bits`` -> ``[N, ceil(K * bits / 8)]``."""
    rows, columns = codes.shape
    if bits == 8:
        return codes
    packed = np.empty((rows, -(-columns * bits // 8)), np.uint8)
    for part in _chunks(rows, columns):
        source = np.pad(codes[part], ((0, 0), (0, -columns % 8)))
        if bits == 4:
            pairs = source.view("<u2")
            packed[part] = (pairs | pairs >> 4).astype(np.uint8)[:, : packed.shape[1]]
            continue
        eights = source.reshape(len(source), -1, 8)
        words = np.zeros(eights.shape[:2], "<u8")
        for i in range(8):
            words |= eights[:, :, i].astype("<u8") << np.uint64(bits * i)
        filled = words.view(np.uint8).reshape(*words.shape, 8)[:, :, :bits]
        packed[part] = filled.reshape(len(source), -1)[:, : packed.shape[1]]
    return packed


def unpack_rows(packed: Bytes, bits: int, columns: int) -> Bytes:
    """The inverse of `pack_rows`: ``[N, ceil(columns * bits / 8)]`` bytes (or more, which are left
    unread) -> codes ``[N, columns]``.
    """
    if bits == 8:
        return packed[:, :columns]
    rows, mask = len(packed), np.uint64((1 << bits) - 1)
    codes = np.empty((rows, -(-columns // 8) * 8), np.uint8)
    size = codes.shape[1] // 8 * bits
    for part in _chunks(rows, columns):
        source = packed[part, :size]
        source = np.pad(source, ((0, 0), (0, size - source.shape[1])))
        words = np.zeros((len(source), size // bits, 8), np.uint8)
        words[:, :, :bits] = source.reshape(len(source), -1, bits)
        values = words.view("<u8")[:, :, 0]
        eights = codes[part].reshape(*values.shape, 8)
        for i in range(8):
            eights[:, :, i] = values >> np.uint64(bits * i) & mask
    return codes[:, :columns]


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(_CHUNK // max(columns, 1), 1)
    return (slice(start, start + step) for start in range(0, rows, step))
