"""Images stretched over a canvas of square tiles that has about their shape, with the whole image
last: InternVL 3, LFM2-VL.

Sources: transformers 5.24, models/got_ocr2 (which InternVL uses), models/internvl, models/lfm2_vl.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import BICUBIC, BILINEAR, ImageProcessor, Picture, Size, Tiling
from sdk.images.processors.settings import Settings
from sdk.images.processors.towers import tile_side, tokens_per_side


class Canvas:
    """Chooses rows and columns of tiles."""

    def __init__(self, side: int, least: int, most: int) -> None:
        self.side = side
        shapes = [
            (rows, columns)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if least <= rows * columns <= most
        ]
        self.shapes = sorted(shapes, key=math.prod)

    def shape(self, height: int, width: int) -> Size:
        """Rows and columns of the canvas whose aspect ratio is nearest. Of several the one with
        more tiles, unless it had more than twice the pixels of the image."""
        best, least = (1, 1), math.inf
        for rows, columns in self.shapes:
            distance = abs(width / height - columns / rows)
            if distance < least:
                best, least = (rows, columns), distance
            elif distance == least and height * width > 0.5 * self.side**2 * rows * columns:
                best = rows, columns
        return best


class InternProcessor(ImageProcessor):
    """InternVL: up to ``max_patches`` tiles and the whole image."""

    placeholder = "<IMG_CONTEXT>"

    def __init__(self, settings: Settings) -> None:
        self._side = tile_side(settings, 384)
        self._resample = settings.resample(BICUBIC)
        least, most = settings.number("min_patches", 1), settings.number("max_patches", 12)
        if least > most:
            raise settings.invalid("min_patches", least, f"at most max_patches, {most}")
        # transformers' processor of InternVL cuts unless a call says otherwise, whatever the
        # checkpoint says.
        self._canvas = Canvas(self._side, least, most)
        ratio = settings.config.get("downsample_ratio", 0.5)
        if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1 or (1 / ratio) % 1:
            raise settings.invalid("downsample_ratio", ratio, "1 / a whole number")
        side = tokens_per_side(settings, self._side, settings.patch(14), int(1 / ratio))
        self._grid = side, side
        self._tokens = side * side
        named = settings.number("image_seq_length", self._tokens)
        if named != self._tokens:
            raise settings.invalid("image_seq_length", named, str(self._tokens))
        settings.done()
        self.most_tokens = self._tokens * (most + 1 if most > 1 else 1)

    def _tiling(self, height: int, width: int) -> Tiling:
        rows, columns = self._canvas.shape(height, width)
        tiles = rows * columns
        tiles += 1 if tiles > 1 else 0
        return Tiling((self._grid,) * tiles, tiles * self._tokens, rows, columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        tile = self._side, self._side
        size = tiling.rows * self._side, tiling.columns * self._side
        yield from picture.resized(size, self._resample).cut(tile)
        if len(tiling.grids) > 1:
            yield picture.resized(tile, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        return "<img>", tiling.num_tokens, "</img>"


class LfmProcessor(ImageProcessor):
    """LFM2-VL: an image of a variable size, or if it is large tiles and that image."""

    placeholder = "<image>"

    def __init__(self, settings: Settings) -> None:
        patch = settings.patch(settings.number("encoder_patch_size", 16))
        named = settings.number("encoder_patch_size", patch)
        if named != patch:
            raise settings.invalid("encoder_patch_size", named, f"the tower's, {patch}")
        merge = settings.number("downsample_factor", 2)
        merge = settings.number("downsample_factor", merge, of=settings.config)
        self._factor = patch * merge
        self._least_side = 1 / merge
        self._resample = settings.resample(BILINEAR)
        self._tokens = (
            settings.number("min_image_tokens", 64),
            settings.number("max_image_tokens", 256),
        )
        if self._tokens[0] > self._tokens[1]:
            raise settings.invalid("min_image_tokens", self._tokens[0], f"<= {self._tokens[1]}")
        self._tolerance = settings.fraction("max_pixels_tolerance", 2.0)
        self._overview = settings.flag("use_thumbnail", True)
        self._canvas: Canvas | None = None
        self.most_tokens = self._tokens[1]
        tiles = settings.number("min_tiles", 2), settings.number("max_tiles", 10)
        split = settings.flag("do_image_splitting", True)
        if not settings.flag("use_image_special_tokens", True):
            raise settings.unsupported("use_image_special_tokens", False, "true")
        settings.done()
        if split and tiles != (1, 1):
            side = settings.number("tile_size", 512)
            if not 2 <= tiles[0] <= tiles[1] or side % self._factor:
                raise settings.invalid(
                    "min_tiles, max_tiles, tile_size",
                    (*tiles, side),
                    f"2 <= min_tiles <= max_tiles, tile_size a multiple of {self._factor}",
                )
            self._canvas = Canvas(side, *tiles)
            overview = self._tokens[1] if self._overview else 0
            most = tiles[1] * (side // self._factor) ** 2 + overview
            self.most_tokens = max(self.most_tokens, most)

    def _is_large(self, height: int, width: int) -> bool:
        factor = self._factor
        # transformers takes a patch as the least side here, and a token below.
        sides = (max(self._least_side, round(side / factor)) for side in (height, width))
        return math.prod(sides) > self._tokens[1] * self._tolerance

    def _whole(self, height: int, width: int) -> Size:
        """Rows and columns of tokens of the whole image."""
        factor, (least, most) = self._factor, self._tokens
        rows, columns = (max(1, round(side / factor)) for side in (height, width))
        if rows * columns > most:
            scale = math.sqrt(height * width / (most * factor**2))
            rows = max(1, math.floor(height / scale / factor))
            columns = max(1, math.floor(width / scale / factor))
        elif rows * columns < least:
            scale = math.sqrt(least * factor**2 / (height * width))
            rows = math.ceil(height * scale / factor)
            columns = math.ceil(width * scale / factor)
        return rows, columns

    def _tiling(self, height: int, width: int) -> Tiling:
        whole = self._whole(height, width)
        if self._canvas is None or not self._is_large(height, width):
            return Tiling((whole,), math.prod(whole))
        rows, columns = self._canvas.shape(height, width)
        across = self._canvas.side // self._factor
        grids = ((across, across),) * (rows * columns)
        grids = (*grids, whole) if self._overview else grids
        return Tiling(grids, sum(map(math.prod, grids)), rows, columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        cut = tiling.rows * tiling.columns
        if self._canvas is not None and self._is_large(picture.height, picture.width):
            side = self._canvas.side
            size = tiling.rows * side, tiling.columns * side
            yield from picture.resized(size, self._resample).cut((side, side))
            if len(tiling.grids) == cut:
                return
        rows, columns = tiling.grids[-1]
        size = rows * self._factor, columns * self._factor
        yield picture.resized(size, self._resample).pixels()

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        parts: list[str | int] = ["<|image_start|>"]
        counts = [math.prod(grid) for grid in tiling.grids]
        cut = tiling.rows * tiling.columns
        if cut > 1:
            for index in range(cut):
                row, column = divmod(index, tiling.columns)
                parts += [f"<|img_row_{row + 1}_col_{column + 1}|>", counts[index]]
            if len(counts) > cut:
                parts += ["<|img_thumbnail|>", counts[-1]]
        else:
            parts.append(counts[0])
        return [*parts, "<|image_end|>"]


__all__ = ["InternProcessor", "LfmProcessor"]
