"""From the pixels of a tile to the rows that a tower's first matrix multiplies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdk.models.vision.config import VisionConfig


def color_table(config: VisionConfig) -> NDArray[np.float32]:
    """What becomes of each number from 0 to 255 of each color, float32 ``[3, 256]``, in the order
    of transformers' processors: rescaled in float64, normalized in float32."""
    scaled = (np.arange(256) * config.scale).astype(np.float32)
    mean, std = (np.array(x, np.float32)[:, None] for x in (config.mean, config.std))
    found: NDArray[np.float32] = (scaled - mean) / std
    return found


def patch_rows(
    tile: NDArray[np.uint8], table: NDArray[np.float32], patch: int
) -> NDArray[np.float32]:
    """A tile uint8 ``[height, width, 3]`` -> its patches row by row, float32
    ``[patches, 3 * patch * patch]``: the red of a patch, then green, then blue. What a side has
    beyond whole patches is left out, as a convolution does."""
    rows, columns = tile.shape[0] // patch, tile.shape[1] // patch
    whole = tile[: rows * patch, : columns * patch]
    squares = whole.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    found = np.empty((rows, columns, 3, patch, patch), np.float32)
    for color in range(3):
        np.take(table[color], squares[:, :, color], out=found[:, :, color])
    return found.reshape(rows * columns, -1)
