"""Images as a picture of the whole and tiles of a larger one (LLaVA-Next, LLaVA-OneVision).

The larger picture has one of several sizes. What an image does not fill of it is left out of the
tokens, and each row of them ends with a token of its own.

transformers' ``pack_image_features`` and ``unpad_image``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.models.vision.image import ImageInput

if TYPE_CHECKING:
    from sdk.models.vision.config import VisionConfig

Size = tuple[int, int]


def best_size(sizes: Sequence[Size], height: int, width: int) -> Size:
    """The size (rows, columns of pixels) that keeps most of an image, and of several the one that
    wastes the least."""

    def kept_and_wasted(size: Size) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - size[0] * size[1]

    return max(sizes, key=kept_and_wasted)


def filled(down: int, across: int, size: Size) -> tuple[slice, slice]:
    """The rows and columns of ``down`` x ``across`` tokens that an image of ``size`` fills."""
    height, width = size
    if width / height > across / down:
        empty = (down - int(round(height * (across / width), 7))) // 2
        return slice(empty, down - empty), slice(0, across)
    empty = (across - int(round(width * (down / height), 7))) // 2
    return slice(0, down), slice(empty, across - empty)


def shrunk(down: int, across: int, most: int | None) -> Size:
    """The rows and columns of a grid of tokens that has about ``most`` of them at most."""
    ratio = 1.0 if most is None else math.sqrt(down * across / most)
    return (down, across) if ratio <= 1.1 else (int(down // ratio), int(across // ratio))


def packed_tokens(image: ImageInput, config: VisionConfig) -> int:
    """How many tokens the tiles of an image become.

    :raises ValueError: it has no pixels, or other tiles than an image of its size.
    """
    if any(type(side) is not int or side < 1 for side in image.size):
        raise ValueError(f"a size of {image.size} pixels, expected at least 1 x 1")
    side, tokens = config.tile_side * config.patch, config.tile_side // config.merge
    height, width = best_size(config.pictures, *image.size)
    rows, columns = height // side, width // side
    if len(image.tiles) != 1 + rows * columns:
        raise ValueError(
            f"{len(image.tiles)} tiles of an image of {image.size[0]} x {image.size[1]} pixels, "
            f"expected {1 + rows * columns}"
        )
    kept = filled(rows * tokens, columns * tokens, image.size)
    most = None if config.most_tiles is None else config.most_tiles * tokens**2
    down, across = (max(part.stop - part.start, 0) for part in kept)
    down, across = shrunk(down, across, most)
    return tokens**2 + down * (across + 1)


class Packer:
    """Puts the tokens of an image's tiles together.

    ``sizes``: of the larger pictures, in pixels; ``side``: of a tile; ``tokens``: per side of it.
    ``newline`` float32 ``[hidden]``: the end of a row. ``most_tiles``: beyond that many the larger
    picture is shrunk.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        side: int,
        tokens: int,
        newline: Tensor,
        most_tiles: int | None,
    ) -> None:
        self.sizes, self.side, self.tokens = sizes, side, tokens
        self.newline, self.most_tiles = newline, most_tiles

    def __call__(self, rows: Tensor, image: ImageInput) -> Tensor:
        """The tokens of all tiles, float32 ``[tiles * tokens, hidden]`` -> those of the image."""
        area, t = self.tokens**2, self.tokens
        whole, rest = rows[:area], rows[area:]
        height, width = best_size(self.sizes, *image.size)
        down, across = height // self.side, width // self.side
        grid = rest.view(down, across, t, t, -1).permute(0, 2, 1, 3, 4)
        grid = grid.reshape(down * t, across * t, -1)
        grid = self._shrunk(grid[filled(down * t, across * t, image.size)])
        ends = self.newline.expand(len(grid), 1, -1)
        return torch.cat([whole, torch.cat([grid, ends], dim=1).flatten(0, 1)])

    def _shrunk(self, grid: Tensor) -> Tensor:
        most = None if self.most_tiles is None else self.most_tiles * self.tokens**2
        down, across = shrunk(grid.shape[0], grid.shape[1], most)
        return grid if (down, across) == grid.shape[:2] else stretched(grid, down, across)


def stretched(grid: Tensor, down: int, across: int) -> Tensor:
    """``[rows, columns, hidden]`` with other numbers of rows and columns: torch's bilinear
    interpolation without aligned corners."""
    for axis, count in ((0, down), (1, across)):
        have = grid.shape[axis]
        at = (torch.arange(count, dtype=torch.float32) + 0.5) * (have / count) - 0.5
        at = at.clamp(min=0)
        first = at.long().clamp(max=have - 1)
        second = (first + 1).clamp(max=have - 1)
        share = (at - first.float()).view((-1, 1, 1) if axis == 0 else (1, -1, 1)).to(grid.device)
        first, second = first.to(grid.device), second.to(grid.device)
        if axis == 0:
            grid = grid[first] * (1 - share) + grid[second] * share
        else:
            grid = grid[:, first] * (1 - share) + grid[:, second] * share
    return grid
