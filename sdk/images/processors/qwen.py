"""Images of any shape, resized to multiples of the merged patches within a range of pixels:
Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5.

Source: transformers 5.24, models/qwen2_vl/image_processing_pil_qwen2_vl.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import BICUBIC, ImageProcessor, Picture, Size, Tiling, too_narrow
from sdk.images.processors.settings import Settings

#: transformers refuses narrower images.
MAX_ASPECT_RATIO = 200


class QwenProcessor(ImageProcessor):
    """One tile, one token for each merged patch."""

    placeholder = "<|image_pad|>"
    written = "<|vision_start|><|image_pad|><|vision_end|>"

    def __init__(self, settings: Settings) -> None:
        patch, merge = settings.patches_joined(14, 2, "merge_size", "spatial_merge_size")
        self._factor = patch * merge
        self._resample = settings.resample(BICUBIC)
        size = settings.sides("size", {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
        # Older files have the range beside the size, and there it counts.
        low = settings.number(
            "min_pixels", size.get("shortest_edge") or size.get("min_pixels") or 0
        )
        high = settings.number(
            "max_pixels", size.get("longest_edge") or size.get("max_pixels") or 0
        )
        if not 0 < low <= high or high < self._factor**2:
            raise settings.invalid(
                "size",
                size,
                f"shortest_edge <= longest_edge, the latter at least {self._factor**2} pixels",
            )
        self._pixels = low, high
        self.most_tokens = high // self._factor**2
        settings.done()

    def _size(self, height: int, width: int) -> Size:
        if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
            raise too_narrow(
                height, width, f"is more than {MAX_ASPECT_RATIO} times longer than wide"
            )
        factor, (low, high) = self._factor, self._pixels
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > high:
            scale = math.sqrt(height * width / high)
            rows = max(1, math.floor(height / scale / factor))
            columns = max(1, math.floor(width / scale / factor))
        elif rows * columns * factor**2 < low:
            scale = math.sqrt(low / (height * width))
            rows = math.ceil(height * scale / factor)
            columns = math.ceil(width * scale / factor)
        return rows, columns

    def _tiling(self, height: int, width: int) -> Tiling:
        rows, columns = self._size(height, width)
        return Tiling(((rows, columns),), rows * columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        rows, columns = tiling.grids[0]
        size = rows * self._factor, columns * self._factor
        yield picture.resized(size, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        return (tiling.num_tokens,)


__all__ = ["QwenProcessor"]
