"""From the pixels of a tile to the rows that a tower's first matrix multiplies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.models.vision.anyres import packed_tokens
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.image import ImageInput
from sdk.models.vision.portions import groups
from sdk.quant.safe_repr import safe_repr


class Places(NamedTuple):
    """Where the patches of a tile are: row and column of each, int64 ``[patches]``, of ``shape``
    rows and columns."""

    shape: tuple[int, int]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]

    @property
    def raster(self) -> NDArray[np.int64]:
        """The number of each patch, row by row."""
        return self.rows * self.shape[1] + self.columns


def places(shape: tuple[int, int], merge: int, inner: int = 1) -> Places:
    """Squares of ``merge`` by ``merge`` patches one after the other, row by row, in each of them
    squares of ``inner`` by ``inner`` row by row, and the patches of these row by row: those that
    become one row or one token are neighbours."""
    each = merge // inner, inner
    rows, columns = (np.arange(side, dtype=np.int64).reshape(-1, *each) for side in shape)
    down, right = len(rows), len(columns)
    every = (down, right, each[0], each[0], inner, inner)
    return Places(
        shape,
        np.broadcast_to(rows[:, None, :, None, :, None], every).reshape(-1),
        np.broadcast_to(columns[None, :, None, :, None, :], every).reshape(-1),
    )


#: A tile uint8 ``[height, width, 3]`` and its patches.
Tile = tuple[NDArray[np.uint8], Places]


def check_image(image: ImageInput, config: VisionConfig) -> None:
    """Check all that the engine reads of an image, which callers may have made themselves.

    :raises ValueError: it is not what the tower reads.
    """
    if not isinstance(image.digest, bytes) or not image.tiles:
        raise ValueError(
            f"expected tiles and a digest of bytes, found {len(image.tiles)} tiles and "
            f"{safe_repr(image.digest)}"
        )
    if len(image.grids) != len(image.tiles):
        raise ValueError(
            f"{len(image.tiles)} tiles, expected as many grids, not {len(image.grids)}"
        )
    for tile, grid in zip(image.tiles, image.grids, strict=True):
        _check_tile(tile, grid, config)
    tokens = sum(rows * columns for rows, columns in image.grids)
    if config.pictures:
        tokens = packed_tokens(image, config)
    if image.num_tokens != tokens:
        raise ValueError(f"{image.num_tokens} tokens, expected {tokens}")


def _check_tile(tile: NDArray[np.uint8], grid: tuple[int, int], config: VisionConfig) -> None:
    if tile.dtype != np.uint8 or tile.ndim != 3 or tile.shape[2] != 3 or not tile.size:
        raise ValueError(
            f"a tile of {tile.dtype} and shape {list(tile.shape)}, expected uint8 [height, width, "
            "3]"
        )
    if config.queries:
        _check_queried(tile, grid, config)
        return
    unit = config.patch * config.merge
    shape = tile.shape[0] // config.patch, tile.shape[1] // config.patch
    merged = shape[0] // config.merge, shape[1] // config.merge
    if merged != tuple(grid) or any(side % config.merge for side in shape) or not all(merged):
        raise ValueError(
            f"a tile of {tile.shape[0]} x {tile.shape[1]} pixels and {grid[0]} x {grid[1]} tokens, "
            f"expected sides of {unit} pixels for each token"
        )
    if config.one_size and shape != (config.tile_side, config.tile_side):
        raise ValueError(
            f"a tile of {shape[0]} x {shape[1]} patches, expected {config.tile_side} x "
            f"{config.tile_side}"
        )


def _check_queried(tile: NDArray[np.uint8], grid: tuple[int, int], config: VisionConfig) -> None:
    """A tile that becomes a fixed number of tokens, in one row."""
    if any(side % config.patch for side in tile.shape[:2]) or tuple(grid) != (1, config.queries):
        raise ValueError(
            f"a tile of {tile.shape[0]} x {tile.shape[1]} pixels and {grid[0]} x {grid[1]} tokens, "
            f"expected sides in multiples of {config.patch} pixels and 1 x {config.queries} tokens"
        )


def checked(image: ImageInput, config: VisionConfig) -> list[Tile]:
    """The tiles of an image.

    :raises ValueError: they are not what the tower reads.
    """
    check_image(image, config)
    sides = [(tile.shape[0] // config.patch, tile.shape[1] // config.patch) for tile in image.tiles]
    where = [places(shape, config.merge, config.inner) for shape in sides]
    return list(zip(image.tiles, where, strict=True))


def tile_groups(tiles: Sequence[Tile]) -> list[list[Tile]]:
    """The tiles that run together, in their order."""
    every = groups([len(where.rows) for _, where in tiles])
    return [[tiles[number] for number in group] for group in every]


def windowed(where: Places, config: VisionConfig) -> tuple[Places, list[int], NDArray[np.int64]]:
    """The same patches window by window, row by row, tokens of a window row by row; the patches of
    each window; and for each token its number in this order."""
    unit, side = config.merge**2, config.window
    first = np.arange(0, len(where.rows), unit)
    across = -(-where.shape[1] // side)
    window = where.rows[first] // side * across + where.columns[first] // side
    order = np.argsort(window, kind="stable")
    patches = (order[:, None] * unit + np.arange(unit)).reshape(-1)
    lengths = (np.bincount(window) * unit).tolist()
    return (
        Places(where.shape, where.rows[patches], where.columns[patches]),
        lengths,
        np.argsort(order, kind="stable"),
    )


def color_table(config: VisionConfig) -> NDArray[np.float32]:
    """What becomes of each number from 0 to 255 of each color, float32 ``[3, 256]``, in the order
    of transformers' processors: rescaled in float64, normalized in float32."""
    scaled = (np.arange(256) * config.scale).astype(np.float32)
    mean, std = (np.array(x, np.float32)[:, None] for x in (config.mean, config.std))
    found: NDArray[np.float32] = (scaled - mean) / std
    return found


def patch_rows(
    tile: NDArray[np.uint8], table: NDArray[np.float32], patch: int, where: Places
) -> NDArray[np.float32]:
    """The patches of a tile uint8 ``[height, width, 3]``, float32 ``[patches, 3 * patch * patch]``:
    the red of a patch row by row, then green, then blue. What a side has beyond whole patches is
    left out, as a convolution does."""
    rows, columns = where.shape
    whole = tile[: rows * patch, : columns * patch]
    squares = whole.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    ordered = squares[where.rows, where.columns]
    found = np.empty(ordered.shape, np.float32)
    for color in range(3):
        np.take(table[color], ordered[:, color], out=found[:, color])
    return found.reshape(len(found), -1)
