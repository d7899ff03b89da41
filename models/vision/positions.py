"""Where a patch is: rows of learned tables, interpolated to other sizes, and rotary frequencies.

Everything is computed element by element in numpy, so that its bits depend on neither threads nor
other images.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sdk.models.vision.patches import Places

if TYPE_CHECKING:
    from sdk.models.vision.config import VisionConfig

Array = NDArray[np.float32]


def learned(config: VisionConfig, table: Array, where: Places) -> Array:
    """A row for each patch of a tile of the one size that there is. The first one of the table is
    that of a class token."""
    if config.class_token:
        table = table[1:]
    return table[where.raster]


def column_and_row(config: VisionConfig, table: Array, where: Places) -> Array:
    """The sum of the rows of two tables, that of the columns first (Gemma 4)."""
    columns, rows = np.split(table, 2)
    found: Array = columns[where.columns] + rows[where.rows]
    return found


def smoothed(config: VisionConfig, table: Array, where: Places) -> Array:
    """A square table stretched to the shape, pixel by pixel, with the mean of all entries in reach
    where that is smaller (SigLIP 2): ``F.interpolate`` with ``antialias``."""
    side = math.isqrt(len(table))
    square = table.reshape(side, side, -1)
    across = np.stack([_blend(square, at, 1) for at in _taps(where.shape[1], side)], axis=1)
    every = np.stack([_blend(across, at, 0) for at in _taps(where.shape[0], side)])
    found: Array = every[where.rows, where.columns]
    return found


def _blend(values: Array, taps: list[tuple[int, np.float32]], axis: int) -> Array:
    """The weighted sum of some entries of an axis."""
    total: Array = np.zeros_like(values.take(0, axis))
    for index, weight in taps:
        total += values.take(index, axis) * weight
    return total


def _taps(count: int, side: int) -> list[list[tuple[int, np.float32]]]:
    """For each place of ``count`` the entries of ``side`` that it sees, with their weights."""
    scale = np.float32(side) / np.float32(count)
    reach = max(scale, np.float32(1))
    entries = np.arange(side, dtype=np.float32)
    found = []
    for place in range(count):
        centre = (np.float32(place) + np.float32(0.5)) * scale - np.float32(0.5)
        weights = np.maximum(np.float32(1) - np.abs(entries - centre) / reach, np.float32(0))
        weights = weights / weights.sum()
        found.append([(int(i), weights[i]) for i in np.flatnonzero(weights)])
    return found


def nearest_part(config: VisionConfig, table: Array, where: Places) -> Array:
    """The row of the part of a square table in which a patch begins (Idefics 3); transformers'
    arithmetic in float32."""
    side = math.isqrt(len(table))
    bounds = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    row, column = (
        np.searchsorted(
            bounds,
            np.minimum(
                at.astype(np.float32) * (np.float32(1) / np.float32(count)), np.float32(1 - 1e-6)
            ),
            side="right",
        )
        for at, count in zip((where.rows, where.columns), where.shape, strict=True)
    )
    found: Array = table[row * side + column]
    return found


def bilinear(config: VisionConfig, table: Array, where: Places) -> Array:
    """A square table stretched to the shape, its corners to the corners (Qwen3-VL)."""
    side = math.isqrt(len(table))
    (top, down), (left, right) = (
        _corners(at, count, side)
        for at, count in zip((where.rows, where.columns), where.shape, strict=True)
    )
    found = np.zeros((len(where.rows), table.shape[1]), np.float32)
    one = np.float32(1)
    for row, row_share in ((top, one - down), (top + 1, down)):
        for column, column_share in ((left, one - right), (left + 1, right)):
            index = np.minimum(row, side - 1) * side + np.minimum(column, side - 1)
            found += table[index] * (row_share * column_share)[:, None]
    return found


def _corners(
    at: NDArray[np.int64], count: int, side: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """For place ``at`` of ``count`` the entry before it, of ``side``, and how far it is behind."""
    exact = at.astype(np.float32) * np.float32((side - 1) / max(count - 1, 1))
    before = exact.astype(np.int64)
    return before, exact - before.astype(np.float32)


def columns_then_rows(config: VisionConfig) -> tuple[Array, NDArray[np.int32]]:
    """As :func:`rows_then_columns`, the other way round (Gemma 4)."""
    frequencies, axes = rows_then_columns(config)
    return frequencies, 1 - axes


def rows_then_columns(config: VisionConfig) -> tuple[Array, NDArray[np.int32]]:
    """Frequencies of half as many features as a head has, first turning by the row, then the same
    ones by the column, and these axes (Qwen's towers)."""
    tower = config.tower
    half = (tower.rotary_dim or 0) // 2
    powers = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    once = np.float32(1) / (tower.theta ** powers.astype(np.float64)).astype(np.float32)
    axes = np.repeat(np.array([0, 1], np.int32), len(once))
    return np.concatenate([once, once]), axes


def taking_turns(config: VisionConfig) -> tuple[Array, NDArray[np.int32]]:
    """Frequencies of a head, those with even numbers turning by the row, the others by the column,
    and these axes (Pixtral)."""
    tower = config.tower
    turning = tower.rotary_dim or 0
    exponents = np.arange(0, turning, 2, dtype=np.float32) / np.float32(turning)
    every = np.float32(1) / (tower.theta ** exponents.astype(np.float64)).astype(np.float32)
    parts = every[0::2], every[1::2]
    axes = [np.full(len(part), axis, np.int32) for axis, part in enumerate(parts)]
    return np.concatenate(parts), np.concatenate(axes)
