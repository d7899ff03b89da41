"""Images of any shape, resized to the most pooled patches that a budget holds: Gemma 4.

Source: transformers 5.24, models/gemma4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import BICUBIC, ImageProcessor, Picture, Tiling
from sdk.images.processors.settings import Settings

#: What transformers takes as ``max_soft_tokens``.
BUDGETS = (70, 140, 280, 560, 1120)


class Gemma4Processor(ImageProcessor):
    """One tile, one token for each square of pooled patches."""

    placeholder = "<|image|>"

    def __init__(self, settings: Settings) -> None:
        patch, pooled = settings.patches_joined(16, 3, "pooling_kernel_size")
        self._factor = patch * pooled
        self._resample = settings.resample(BICUBIC)
        self.most_tokens = settings.number("max_soft_tokens", 280)
        if self.most_tokens not in BUDGETS:
            raise settings.invalid(
                "max_soft_tokens", self.most_tokens, f"one of {', '.join(map(str, BUDGETS))}"
            )
        settings.done()

    def _tiling(self, height: int, width: int) -> Tiling:
        factor = self._factor
        scale = math.sqrt(self.most_tokens * factor**2 / (height * width))
        rows, columns = (math.floor(scale * side / factor) for side in (height, width))
        # A side of less than one token is one token, and the other then keeps the aspect ratio.
        if not rows:
            rows, columns = 1, min(width // height, self.most_tokens)
        elif not columns:
            rows, columns = min(height // width, self.most_tokens), 1
        return Tiling(((rows, columns),), rows * columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        rows, columns = tiling.grids[0]
        size = rows * self._factor, columns * self._factor
        yield picture.resized(size, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        return "<|image>", tiling.num_tokens, "<image|>"


__all__ = ["Gemma4Processor"]
