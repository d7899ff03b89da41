"""Images cut into square tiles, with the whole image last: Idefics3, SmolVLM, granite-docling.

Source: transformers 5.24, models/idefics3 and models/smolvlm, which are the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import LANCZOS, ImageProcessor, Picture, Size, Tiling
from sdk.images.processors.settings import Settings
from sdk.images.processors.towers import tile_side, tokens_per_side

#: The longer side of the resized image, whatever the checkpoint says (transformers'
#: MAX_IMAGE_SIZE).
MAX_SIDE = 4096


class IdeficsProcessor(ImageProcessor):
    """Resized to a longest side, then to whole tiles, then cut; the whole is the last tile."""

    placeholder = "<image>"

    def __init__(self, settings: Settings) -> None:
        self._resample = settings.resample(LANCZOS)
        size = settings.sides("size", {"longest_edge": 4 * 364})
        if set(size) != {"longest_edge"}:
            raise settings.unsupported("size", size, "longest_edge")
        self._longest = size["longest_edge"]
        self._side = tile_side(settings, {"longest_edge": 364}, "max_image_size")
        self._split = settings.flag("do_image_splitting", True)
        patch = settings.patch(32)
        merge = settings.number("scale_factor", 2, of=settings.config)
        side = tokens_per_side(settings, self._side, patch, merge)
        self._grid = side, side
        self._tokens = side * side
        named = settings.number("image_seq_len", self._tokens)
        if named != self._tokens:
            raise settings.invalid("image_seq_len", named, str(self._tokens))
        settings.done()
        most = min(self._longest, MAX_SIDE)
        # The shorter side is rounded up to an even number, and so may be longer by one.
        across = math.ceil((most + most % 2) / self._side)
        tiles = across * across + 1 if self._split and across > 1 else 1
        self.most_tokens = tiles * self._tokens

    def _first_size(self, height: int, width: int) -> Size:
        """The size of the first resize, which keeps the aspect ratio."""
        longest, ratio = self._longest, width / height
        if width >= height:
            height, width = int(longest / ratio), longest
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        height, width = max(height, 1), max(width, 1)
        ratio = width / height
        if width >= height and width > MAX_SIDE:
            height, width = int(MAX_SIDE / ratio), MAX_SIDE
        elif height > width and height > MAX_SIDE:
            height, width = MAX_SIDE, int(MAX_SIDE * ratio)
        return max(height, 1), max(width, 1)

    def _second_size(self, height: int, width: int) -> Size:
        """The same in whole tiles."""
        side, ratio = self._side, width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        return height, width

    def _tiling(self, height: int, width: int) -> Tiling:
        rows = columns = 0
        if self._split:
            size = self._second_size(*self._first_size(height, width))
            rows, columns = (side // self._side for side in size)
        tiles = rows * columns + 1 if max(rows, columns) > 1 else 1
        if tiles == 1:
            rows = columns = 0
        return Tiling((self._grid,) * tiles, tiles * self._tokens, rows, columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        tile = self._side, self._side
        picture = picture.resized(self._first_size(picture.height, picture.width), self._resample)
        if self._split:
            size = self._second_size(picture.height, picture.width)
            picture = picture.resized(size, self._resample)
        if tiling.rows:
            yield from picture.cut(tile)
        yield picture.resized(tile, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        around = "<fake_token_around_image>"
        parts: list[str | int] = []
        for row in range(tiling.rows):
            for column in range(tiling.columns):
                parts += [f"{around}<row_{row + 1}_col_{column + 1}>", self._tokens]
            parts.append("\n")
        parts.append("\n" if tiling.rows else "")
        return [*parts, f"{around}<global-img>", self._tokens, around]


__all__ = ["IdeficsProcessor"]
