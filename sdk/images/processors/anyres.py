"""The whole image as one tile, then tiles of one of several sizes that fits its shape best:
LLaVA-Next, LLaVA-OneVision.

The tower drops the tokens of the border that filled the size up, and adds one at the end of each
row. Every image is treated as transformers treats the images of a flat list: alone.

Source: transformers 5.24, models/llava_next, models/llava_onevision, image_processing_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import BICUBIC, ImageProcessor, Picture, Size, Tiling
from sdk.images.processors.settings import Settings
from sdk.images.processors.towers import check_all_patches, tile_side, tokens_per_side

_NEXT_SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_ONEVISION_SIZES = tuple(
    (384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)
)


class AnyResolutionProcessor(ImageProcessor):
    """LLaVA-Next; :class:`OneVisionProcessor` also limits the tokens."""

    placeholder = "<image>"
    #: Sides of tiles and of crops, unless the checkpoint says so.
    _side_by_default = 224
    _crops = True
    #: Of what the tower computes: ``vision_feature_select_strategy`` unless the checkpoint says so.
    _strategy = "default"
    _sizes: tuple[Size, ...] = _NEXT_SIZES
    #: Largest number of tiles whose tokens are all kept.
    _most_tiles: int | None = None

    def __init__(self, settings: Settings) -> None:
        self._resample = settings.resample(BICUBIC)
        self._side = tile_side(settings, self._side_by_default)
        if settings.flag("do_center_crop", self._crops):
            crop = settings.square("crop_size", self._side)
            if crop != self._side:
                raise settings.unsupported("crop_size", crop, f"the size, {self._side}")
        named = [keys.get("image_grid_pinpoints") for keys in (settings.keys, settings.config)]
        for sizes in named:
            if sizes is not None:
                self._sizes = _sizes(settings, sizes, self._side)
        if None not in named and named[0] != named[1]:
            raise settings.invalid("image_grid_pinpoints", named[0], f"the model's, {named[1]}")
        check_all_patches(settings, self._strategy)
        self._tokens_across = tokens_per_side(settings, self._side, settings.patch(14))
        settings.done()
        self._grid = self._tokens_across, self._tokens_across
        self.most_tokens = math.prod(self._grid) + max(map(self._most_kept, self._sizes))

    def _best(self, height: int, width: int) -> Size:
        """The size that keeps most pixels, and of several the one that wastes the fewest."""

        def kept_and_wasted(size: Size) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(self._sizes, key=kept_and_wasted)

    def _kept(self, size: Size, rows: int, columns: int) -> int:
        """Tokens of an image of ``size`` (height, width) in tiles, without those of the border and
        with one more at the end of each row."""
        height, width = size
        down, across = rows * self._tokens_across, columns * self._tokens_across
        if width / height > across / down:
            down -= (down - int(round(height * (across / width), 7))) // 2 * 2
        else:
            across -= (across - int(round(width * (down / height), 7))) // 2 * 2
        return self._shrunk(down, across)

    def _most_kept(self, size: Size) -> int:
        """The same for the image that keeps most tokens of the tiles of ``size``. A smaller part of
        them may be more, because only a large one is shrunk."""
        down, across = (side // self._side * self._tokens_across for side in size)
        return max(
            *(self._shrunk(rows, across) for rows in range(down, 0, -2)),
            *(self._shrunk(down, columns) for columns in range(across, 0, -2)),
        )

    def _shrunk(self, down: int, across: int) -> int:
        """Tokens of a grid, shrunk if it is too large, with one more at the end of each row."""
        if self._most_tiles is not None:
            ratio = math.sqrt(down * across / (self._most_tiles * self._tokens_across**2))
            if ratio > 1.1:
                down, across = int(down // ratio), int(across // ratio)
        return down * (across + 1)

    def _tiling(self, height: int, width: int) -> Tiling:
        rows, columns = (side // self._side for side in self._best(height, width))
        tokens = math.prod(self._grid) + self._kept((height, width), rows, columns)
        return Tiling((self._grid,) * (1 + rows * columns), tokens, rows, columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        tile = self._side, self._side
        yield picture.resized(tile, self._resample).pixels()
        height, width = self._side * tiling.rows, self._side * tiling.columns
        down, across = height / picture.height, width / picture.width
        if across < down:
            size = min(math.ceil(picture.height * across), height), width
        else:
            size = height, min(math.ceil(picture.width * down), width)
        canvas = np.zeros((height, width, 3), np.uint8)
        top, left = (height - size[0]) // 2, (width - size[1]) // 2
        resized = picture.resized(size, self._resample).pixels()
        canvas[top : top + size[0], left : left + size[1]] = resized
        yield from Picture.of(canvas).cut(tile)

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        return (tiling.num_tokens,)


class OneVisionProcessor(AnyResolutionProcessor):
    """LLaVA-OneVision: beyond a number of tiles (``anyres_max_9``) the tower shrinks the grid."""

    _side_by_default = 384
    _crops = False
    _strategy = "full"
    _sizes = _ONEVISION_SIZES

    def __init__(self, settings: Settings) -> None:
        ratio = settings.config.get("vision_aspect_ratio")
        ratio = settings.text("vision_aspect_ratio", "anyres_max_9") if ratio is None else ratio
        number = str(ratio).removeprefix("anyres_max_")
        if number == ratio or not number.isdecimal() or not int(number):
            raise settings.unsupported("vision_aspect_ratio", ratio, "anyres_max_9 or the like")
        self._most_tiles = int(number)
        super().__init__(settings)


def _sizes(settings: Settings, sizes: Any, side: int) -> tuple[Size, ...]:
    """The sizes in a checkpoint: pairs of height and width in whole tiles."""
    found = []
    for size in sizes if isinstance(sizes, (list, tuple)) else [sizes]:
        if not isinstance(size, (list, tuple)) or len(size) != 2:
            raise settings.invalid("image_grid_pinpoints", size, "pairs of height and width")
        for length in size:
            if (
                isinstance(length, bool)
                or not isinstance(length, int)
                or length < 1
                or length % side
            ):
                raise settings.invalid("image_grid_pinpoints", size, f"multiples of {side}")
        found.append((size[0], size[1]))
    if not found:
        raise settings.invalid("image_grid_pinpoints", sizes, "at least one size")
    return tuple(found)


__all__ = ["AnyResolutionProcessor", "OneVisionProcessor"]
