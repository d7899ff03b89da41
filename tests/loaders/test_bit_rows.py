"""Packing codes into rows of bits, against Python's own integers."""

from __future__ import annotations

import numpy as np
import pytest

from sdk.loaders.formats import bit_rows
from sdk.loaders.formats.bit_rows import pack_rows, unpack_rows


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("columns", [1, 7, 8, 33])
def test_a_row_is_one_number_with_the_first_code_lowest(
    bits: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bit_rows, "_CHUNK", 2 * columns)  # two rows at a time
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, columns)).astype(np.uint8)
    packed = pack_rows(codes, bits)
    for row, found in zip(codes, packed, strict=True):
        number = sum(int(code) << bits * i for i, code in enumerate(row))
        assert int.from_bytes(found.tobytes(), "little") == number
        assert len(found) == -(-columns * bits // 8)
    assert np.array_equal(unpack_rows(packed, bits, columns), codes)


def test_bytes_behind_a_row_are_not_looked_at() -> None:
    codes = np.arange(10, dtype=np.uint8).reshape(2, 5) % 8
    packed = np.pad(pack_rows(codes, 3), ((0, 0), (0, 2)), constant_values=255)
    assert np.array_equal(unpack_rows(packed, 3, 5), codes)
