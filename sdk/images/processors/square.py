"""Images that become one square each, whatever their shape: Gemma 3, PaliGemma, LLaVA 1.5, CLIP,
SigLIP.

Sources: transformers 5.24, models/gemma3 and models/paligemma (image processor of SigLIP),
models/llava (of CLIP and LLaVA).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import (
    BICUBIC,
    BILINEAR,
    ImageProcessor,
    Picture,
    Size,
    Tiling,
    too_narrow,
)
from sdk.images.processors.settings import Settings
from sdk.images.processors.towers import check_all_patches, tile_side, tokens_per_side

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)


class PanAndScan(NamedTuple):
    """Crops of a narrow image beside the whole one. Off unless the checkpoint asks for it."""

    min_size: int
    max_crops: int
    min_ratio: float

    def crops(self, height: int, width: int) -> Size:
        """Rows and columns of crops, one of them 1; 0 x 0 without crops."""
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter < self.min_ratio:
            return 0, 0
        count = min(longer // self.min_size, math.floor(longer / shorter + 0.5))
        count = min(self.max_crops, max(2, count))
        if min(math.ceil(longer / count), shorter) < self.min_size:
            return 0, 0
        return (1, count) if width >= height else (count, 1)


class GemmaProcessor(ImageProcessor):
    """Gemma 3: resized to a square, 256 tokens between marks."""

    placeholder = "<start_of_image>"

    def __init__(self, settings: Settings) -> None:
        self._side = tile_side(settings, 896)
        self._resample = settings.resample(BILINEAR)
        tokens = settings.config.get("mm_tokens_per_image")
        self._tokens = settings.number(
            "mm_tokens_per_image", 256, of={"mm_tokens_per_image": tokens}
        )
        self._grid = (math.isqrt(self._tokens),) * 2
        if math.prod(self._grid) != self._tokens:
            raise settings.invalid("mm_tokens_per_image", self._tokens, "a square number")
        self._pan = None
        if settings.flag("do_pan_and_scan", False):
            self._pan = PanAndScan(
                settings.number("pan_and_scan_min_crop_size", 256),
                settings.number("pan_and_scan_max_num_crops", 4),
                settings.fraction("pan_and_scan_min_ratio_to_activate", 1.2),
            )
        settings.done()
        self.most_tokens = self._tokens * (1 + (self._pan.max_crops if self._pan else 0))

    def _tiling(self, height: int, width: int) -> Tiling:
        rows, columns = self._pan.crops(height, width) if self._pan else (0, 0)
        tiles = 1 + rows * columns
        return Tiling((self._grid,) * tiles, tiles * self._tokens, rows, columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        size = self._side, self._side
        yield picture.resized(size, self._resample).pixels()
        if tiling.rows:
            crop = (
                math.ceil(picture.height / tiling.rows),
                math.ceil(picture.width / tiling.columns),
            )
            for pixels in picture.cut(crop):
                yield Picture.of(pixels).resized(size, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        one: tuple[str | int, ...] = (
            "\n\n<start_of_image>",
            self._tokens,
            "<end_of_image>\n\n",
        )
        crops = tiling.rows * tiling.columns
        if not crops:
            return one
        parts: list[str | int] = ["Here is the original image ", *one]
        parts.append(" and here are some crops to help you see better ")
        for index in range(crops):
            parts += [" " if index else "", *one]
        return parts


class PaliGemmaProcessor(ImageProcessor):
    """PaliGemma: resized to a square, one token for each patch, no marks."""

    placeholder = "<image>"
    whole_prompts = True

    def __init__(self, settings: Settings) -> None:
        self._side = tile_side(settings, 224)
        self._resample = settings.resample(BICUBIC)
        side = tokens_per_side(settings, self._side, settings.patch(14))
        self._tiling_of_all = Tiling(((side, side),), side * side)
        self.most_tokens = side * side
        named = settings.number("image_seq_length", self.most_tokens)
        if named != self.most_tokens:
            raise settings.invalid("image_seq_length", named, str(self.most_tokens))
        settings.done()

    def framed(self, prompt: str, bos: str) -> str:
        """The sequence begins after the last image, and a line feed ends the prompt."""
        end = prompt.rfind(self.placeholder)
        if end < 0:
            return prompt
        end += len(self.placeholder)
        return f"{prompt[:end]}{bos}{prompt[end:]}\n"

    def _tiling(self, height: int, width: int) -> Tiling:
        return self._tiling_of_all

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        yield picture.resized((self._side, self._side), self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        return (tiling.num_tokens,)


class MiddleProcessor(ImageProcessor):
    """The shorter side resized to that of the tower, then its middle (CLIP), or all of an image
    resized to a square (SigLIP)."""

    placeholder = "<image>"

    def __init__(self, settings: Settings) -> None:
        self._resample = settings.resample(BICUBIC)
        crops = settings.flag("do_center_crop", settings.kind != "SiglipImageProcessor")
        self._crop = tile_side(settings, 224, "crop_size" if crops else "size")
        size = settings.sides("size", {"shortest_edge" if crops else "height": self._crop})
        if crops and isinstance(settings.keys.get("size"), int):
            size = {"shortest_edge": size["height"]}  # so CLIP's class reads one number
        self._shortest = size.get("shortest_edge")
        self._side = settings.square("size", size)
        if self._shortest is not None and not crops:
            raise settings.unsupported("size", size, "height and width without do_center_crop")
        grid = self._grid(settings)
        self._tiling_of_all = Tiling((grid,), math.prod(grid))
        self.most_tokens = math.prod(grid)
        settings.done()

    @abstractmethod
    def _grid(self, settings: Settings) -> Size:
        """Rows and columns of the tokens that an image becomes."""

    def _tiling(self, height: int, width: int) -> Tiling:
        return self._tiling_of_all

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        size = self._side, self._side
        if self._shortest is not None:
            size = shortest_edge(picture.height, picture.width, self._side)
        yield center_crop(picture.resized(size, self._resample).pixels(), self._crop)

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        return (tiling.num_tokens,)


class LlavaProcessor(MiddleProcessor):
    """LLaVA 1.5: one token for each patch; some files pad an image to a square first."""

    def _grid(self, settings: Settings) -> Size:
        # CLIP's processor has another padding of that name, which does nothing to one image.
        self._background: tuple[int, ...] | None = None
        if settings.kind == "LlavaImageProcessor" and settings.flag("do_pad", False):
            mean: Any = settings.keys.get("image_mean") or CLIP_MEAN
            self._background = tuple(int(value * 255) for value in mean)
        check_all_patches(settings, "default")
        side = tokens_per_side(settings, self._crop, settings.patch(14))
        return side, side

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        if self._background is not None:
            picture = picture.padded_to_square(self._background)
        yield from super()._tiles(picture, tiling)


class DualProcessor(MiddleProcessor):
    """CLIP and SigLIP beside their encoders of texts: one vector for an image."""

    def _grid(self, settings: Settings) -> Size:
        tokens_per_side(settings, self._crop, settings.patch(16))
        return 1, 1


class NaflexProcessor(ImageProcessor):
    """SigLIP 2 for all shapes: as many whole patches as a number allows, of about the same aspect
    ratio, and one vector."""

    placeholder = "<image>"
    most_tokens = 1

    def __init__(self, settings: Settings) -> None:
        self._resample = settings.resample(BILINEAR)
        self._patch = settings.patch(settings.number("patch_size", 16))
        named = settings.number("patch_size", self._patch)
        if named != self._patch:
            raise settings.invalid("patch_size", named, f"the tower's, {self._patch}")
        self._most = settings.number("max_num_patches", 256)
        settings.done()

    def _tiling(self, height: int, width: int) -> Tiling:
        rows, columns = self._size(height, width)
        if rows * columns > self._most * self._patch**2:
            raise too_narrow(
                height, width, f"would become more than the {self._most} patches of this model"
            )
        return Tiling(((1, 1),), 1)

    def _size(self, height: int, width: int) -> Size:
        """The sides in pixels: the largest scale, by bisection, at which the patches fit."""

        def scaled(scale: float) -> Size:
            patch = self._patch
            down, across = (
                max(patch, math.ceil(side * scale / patch) * patch) for side in (height, width)
            )
            return down, across

        low, high, end = 1e-6, 100.0, 1e-5
        while high - low >= end:
            middle = (low + high) / 2
            rows, columns = scaled(middle)
            if (rows / self._patch) * (columns / self._patch) <= self._most:
                low = middle
            else:
                high = middle
        return scaled(low)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        size = self._size(picture.height, picture.width)
        yield picture.resized(size, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        return (1,)


def shortest_edge(height: int, width: int, edge: int) -> Size:
    """The size at which the shorter side is ``edge``, and the aspect ratio as it was."""
    longer = int(edge * max(height, width) / min(height, width))
    return (longer, edge) if width <= height else (edge, longer)


def center_crop(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """The middle, ``[side, side, 3]``; black where the image does not reach."""
    height, width = pixels.shape[:2]
    top, left = (height - side) // 2, (width - side) // 2
    if top >= 0 and left >= 0:
        return pixels[top : top + side, left : left + side]
    rows, columns = max(side, height), max(side, width)
    canvas = np.zeros((rows, columns, 3), np.uint8)
    down, right = math.ceil((rows - height) / 2), math.ceil((columns - width) / 2)
    canvas[down : down + height, right : right + width] = pixels
    top, left = max(0, top + down), max(0, left + right)
    return canvas[top : top + side, left : left + side]


__all__ = [
    "DualProcessor",
    "GemmaProcessor",
    "LlavaProcessor",
    "NaflexProcessor",
    "PaliGemmaProcessor",
]
