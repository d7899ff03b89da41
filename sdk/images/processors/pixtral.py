"""Images of any shape within a largest side, with a mark after each row: Pixtral, Mistral 3.

Source: transformers 5.24, models/pixtral.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import BICUBIC, ImageProcessor, Picture, Tiling, too_narrow
from sdk.images.processors.settings import Settings


class PixtralProcessor(ImageProcessor):
    """One tile, one token for each merged patch, each row of them followed by a mark."""

    placeholder = "[IMG]"

    def __init__(self, settings: Settings) -> None:
        patch = settings.patch(16)
        merge = settings.number("spatial_merge_size", 1)
        merge = settings.number("spatial_merge_size", merge, of=settings.config)
        self._factor = patch * merge
        self._resample = settings.resample(BICUBIC)
        size = settings.sides("size", {"longest_edge": 1024})
        edge = size.get("longest_edge")
        if edge is None and not {"height", "width"} <= set(size):
            raise settings.unsupported("size", size, "longest_edge, or height and width")
        self._most = (edge, edge) if edge else (size["height"], size["width"])
        self._break = settings.text("image_break_token", "[IMG_BREAK]")
        self._end = settings.text("image_end_token", "[IMG_END]")
        self.placeholder = settings.text("image_token", "[IMG]")
        if settings.flag("do_center_crop", False):
            raise settings.unsupported("do_center_crop", True, "false")
        rows, columns = (math.ceil(side / self._factor) for side in self._most)
        self.most_tokens = rows * columns
        settings.done()

    def _tiling(self, height: int, width: int) -> Tiling:
        most_height, most_width = self._most
        ratio = max(height / most_height, width / most_width)
        sides = (height, width)
        if ratio > 1:
            sides = math.floor(height / ratio), math.floor(width / ratio)
        if not all(sides):
            raise too_narrow(height, width, f"would be resized to {sides[0]} x {sides[1]}")
        rows, columns = ((side - 1) // self._factor + 1 for side in sides)
        return Tiling(((rows, columns),), rows * columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        rows, columns = tiling.grids[0]
        size = rows * self._factor, columns * self._factor
        yield picture.resized(size, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        rows, columns = tiling.grids[0]
        return [*(columns, self._break) * (rows - 1), columns, self._end]


__all__ = ["PixtralProcessor"]
