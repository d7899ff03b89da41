"""The whole image as one tile of about a fixed area, then, of a larger one, slices of about that
area: MiniCPM-V.

Source: transformers 5.24, models/minicpmv4_6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors.base import BICUBIC, ImageProcessor, Picture, Size, Tiling, too_narrow
from sdk.images.processors.settings import Settings
from sdk.models.vision.minicpmv4_6 import most_tokens


class SliceProcessor(ImageProcessor):
    """MiniCPM-V 4.6: sides of tiles are multiples of ``unit`` pixels, which become a token."""

    placeholder = "<|image_pad|>"

    def __init__(self, settings: Settings) -> None:
        self._unit = self._side_of_token(settings)
        self._resample = settings.resample(BICUBIC)
        own = Settings(settings.config.get("slice_config") or {}, {})  # of versions up to 4.5
        side, slices = (
            own.number(key, default, of=own.config)
            for key, default in (("scale_resolution", 448), ("max_slice_nums", 9))
        )
        self._area_side = settings.number("scale_resolution", side)
        self._slices = settings.number("max_slice_nums", slices)
        if not settings.flag("slice_mode", True):
            self._slices = 1
        self._numbered = settings.flag("use_image_id", True)
        settings.done()
        self.most_tokens = self._most(settings)

    def _side_of_token(self, settings: Settings) -> int:
        patch = settings.patch(settings.number("patch_size", 14))
        named = settings.number("patch_size", patch)
        if named != patch:
            raise settings.invalid("patch_size", named, f"the tower's, {patch}")
        mode = settings.config.get("downsample_mode") or "16x"
        named_mode = settings.text("downsample_mode", str(mode))
        if named_mode != mode:
            raise settings.invalid("downsample_mode", named_mode, f"the model's, {mode}")
        return patch * (2 if mode == "4x" else 4)

    def _most(self, settings: Settings) -> int:
        return most_tokens(self._area_side, self._slices, self._unit)

    def before(self, number: int) -> str:
        """See :meth:`ImageProcessor.before`."""
        return f"<image_id>{number}</image_id>" if self._numbered else ""

    def _tokens(self, size: Size) -> Size:
        """Rows and columns of the tokens of a tile."""
        return size[0] // self._unit, size[1] // self._unit

    def _cut(self, height: int, width: int) -> Size | None:
        """Rows and columns of slices; ``None``: the image has none."""
        ratio = math.log(width / height)
        pieces = min(math.ceil(height * width / self._area_side**2), self._slices)
        if pieces <= 1:
            return None
        best, least = (1, 1), math.inf
        for count in (pieces - 1, pieces, pieces + 1):
            if count == 1 or count > self._slices:
                continue
            for rows in range(1, count + 1):
                if count % rows:
                    continue
                columns = count // rows
                error = abs(ratio - math.log(columns / rows))
                if error < least or (error == least and rows > best[0]):
                    best, least = (rows, columns), error
        return best

    def _resized(self, height: float, width: float, *, enlarged: bool) -> Size:
        """Height and width of a tile in whole tokens. Smaller ones keep about their size unless
        they are ``enlarged``."""
        if enlarged or height * width > self._area_side**2:
            ratio = width / height
            height = int(self._area_side / math.sqrt(ratio))
            width = int(height * ratio)
        return multiple(height, self._unit), multiple(width, self._unit)

    def _sizes(self, height: int, width: int) -> tuple[Size, Size, Size | None]:
        """Of the tile of the whole image, of a slice, and how many slices there are."""
        cut = self._cut(height, width)
        whole = self._resized(height, width, enlarged=cut is None)
        if cut is None:
            return whole, (0, 0), None
        rows, columns = cut
        one = multiple(height, rows) / rows, multiple(width, columns) / columns
        return whole, self._resized(*one, enlarged=True), cut

    def _tiling(self, height: int, width: int) -> Tiling:
        whole, one, cut = self._sizes(height, width)
        rows, columns = cut or (0, 0)
        grids = (self._tokens(whole), *(self._tokens(one),) * (rows * columns))
        return Tiling(grids, sum(map(math.prod, grids)), rows, columns)

    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        whole, one, cut = self._sizes(picture.height, picture.width)
        yield picture.resized(whole, self._resample).pixels()
        if cut is not None:
            size = one[0] * cut[0], one[1] * cut[1]
            yield from picture.resized(size, self._resample).cut(one)

    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        first, *others = map(math.prod, tiling.grids)
        parts: list[str | int] = ["<image>", first, "</image>"]
        for index, count in enumerate(others):
            row_begins = index and not index % tiling.columns
            parts += ["\n<slice>" if row_begins else "<slice>", count, "</slice>"]
        return parts


class QueriedSliceProcessor(SliceProcessor):
    """MiniCPM-V 2.6 to 4.5: sides are multiples of a patch, and all tiles have as many tokens."""

    placeholder = "(<image>./</image>)"

    def _side_of_token(self, settings: Settings) -> int:
        patch = settings.patch(settings.number("patch_size", 14))
        self._queries = settings.number("query_num", 64, of=settings.config)
        named = settings.number("image_feature_size", self._queries)
        if named != self._queries:
            raise settings.invalid("image_feature_size", named, f"the model's, {self._queries}")
        return patch

    def _most(self, settings: Settings) -> int:
        self._most_patches = most_tokens(self._area_side, self._slices, self._unit)
        return (1 + (self._slices if self._slices > 1 else 0)) * self._queries

    def _tiling(self, height: int, width: int) -> Tiling:
        tiling = super()._tiling(height, width)
        if tiling.num_tokens > self._most_patches:
            raise too_narrow(
                height,
                width,
                f"would become {tiling.num_tokens:,} patches of at most {self._most_patches:,}",
            )
        tiles = len(tiling.grids)
        return Tiling(
            ((1, self._queries),) * tiles, tiles * self._queries, tiling.rows, tiling.columns
        )


def multiple(length: float, unit: int) -> int:
    """The multiple of a unit that is nearest, at least one."""
    return max(round(length / unit) * unit, unit)


__all__ = ["QueriedSliceProcessor", "SliceProcessor"]
