"""What all image processors share: resizing, cutting into tiles, what replaces a placeholder."""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError
from sdk.kernels.packages import package
from sdk.models.vision.image import ImageInput

#: Filters of a resize, as Pillow numbers them.
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
#: Rows and columns.
Size = tuple[int, int]
#: The largest image that a resize may make on the way; 3 bytes each.
MAX_RESIZED_PIXELS = 2**27


class Tiling(NamedTuple):
    """What becomes of an image, known from its size alone.

    ``grids``: rows and columns of tokens of each tile. ``num_tokens``: rows of embeddings.
    ``rows``, ``columns``: how the tiles other than an overview lie side by side.
    """

    grids: tuple[Size, ...]
    num_tokens: int
    rows: int = 1
    columns: int = 1


class ImageProcessor(ABC):
    """Preprocessing of one model: pixels become what its tower reads, and a part of the prompt.

    The pixels are those of transformers' processors with Pillow, bit for bit; tests/images says
    where they differ. Every method depends on the size alone except :meth:`read`.
    """

    #: What chat templates write where an image belongs; :meth:`layout` replaces it.
    placeholder: str
    #: No image becomes more tokens.
    most_tokens: int
    #: All tokens of a prompt with images see each other both ways, those of an answer do not.
    whole_prompts = False

    @property
    def written(self) -> str:
        """The placeholder with what chat templates write around it, for templates that write no
        images."""
        return self.placeholder

    def read(self, pixels: NDArray[np.uint8]) -> ImageInput:
        """An image, uint8 ``[height, width, 3]``, resized and cut into tiles.

        :raises RequestError: it is too narrow for this model.
        """
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or not pixels.size:
            raise RequestError(
                f"an image is an array of {pixels.dtype} and shape {list(pixels.shape)}, expected "
                "uint8 [height, width, 3]: see sdk.images.decode"
            )
        height, width = pixels.shape[:2]
        tiling = self.tiling(height, width)
        picture = Picture.of(pixels)
        tiles = tuple(np.ascontiguousarray(tile) for tile in self._tiles(picture, tiling))
        digest = hashlib.blake2b(repr((height, width, tiling)).encode(), digest_size=32)
        for tile in tiles:
            digest.update(repr(tile.shape).encode())
            digest.update(tile.data)
        return ImageInput(tiles, tiling.grids, tiling.num_tokens, digest.digest(), (height, width))

    def num_tokens(self, height: int, width: int) -> int:
        """How many tokens of the model an image of this size becomes, without marks around them.

        :raises RequestError: it is too narrow for this model.
        """
        return self.tiling(height, width).num_tokens

    def layout(self, image: ImageInput, number: int = 0) -> list[str | int]:
        """What replaces the placeholder of the image ``number`` of a prompt, from 0 on: text, and
        numbers of image tokens. Text and numbers alternate. The text belongs to that around the
        placeholder: join them before tokenizing."""
        return joined([self.before(number), *self._marked(self.tiling(*image.size))])

    def before(self, number: int) -> str:
        """What a prompt has before its image ``number``; most models' have nothing."""
        return ""

    def framed(self, prompt: str, bos: str) -> str:
        """A prompt with placeholders as the model's own processor frames it; most do not. ``bos``:
        the text of the token that begins a sequence, which the tokenizer must not add where this
        changes the prompt."""
        return prompt

    def tiling(self, height: int, width: int) -> Tiling:
        """What becomes of an image of this size.

        :raises RequestError: it is too narrow for this model.
        """
        if height < 1 or width < 1:
            raise RequestError(f"an image of {height} x {width} pixels, expected at least 1 x 1")
        tiling = self._tiling(height, width)
        if tiling.num_tokens > self.most_tokens:
            raise too_narrow(
                height,
                width,
                f"would become {tiling.num_tokens:,} tokens of at most {self.most_tokens:,}",
            )
        return tiling

    @abstractmethod
    def _tiling(self, height: int, width: int) -> Tiling: ...

    @abstractmethod
    def _tiles(self, picture: Picture, tiling: Tiling) -> Iterator[NDArray[np.uint8]]:
        """The tiles, in the order of the grids."""

    @abstractmethod
    def _marked(self, tiling: Tiling) -> Sequence[str | int]:
        """Text and numbers of image tokens, not yet joined."""


class Picture:
    """An image of Pillow. ``height`` and ``width`` are its sides."""

    def __init__(self, image: Any) -> None:
        self.image = image
        self.width, self.height = image.size

    @staticmethod
    def of(pixels: NDArray[np.uint8]) -> Picture:
        """A copy of ``pixels``, uint8 ``[height, width, 3]``."""
        image: Any = package("PIL.Image", "resizing an image needs")
        return Picture(image.fromarray(np.ascontiguousarray(pixels)))

    def padded_to_square(self, color: tuple[int, ...]) -> Picture:
        """In the middle of a square of one colour."""
        side = max(self.height, self.width)
        if side * side > MAX_RESIZED_PIXELS:
            raise too_narrow(self.height, self.width, f"would be padded to {side:,} x {side:,}")
        canvas = np.empty((side, side, 3), np.uint8)
        canvas[:] = color
        top, left = (side - self.height) // 2, (side - self.width) // 2
        canvas[top : top + self.height, left : left + self.width] = self.pixels()
        return Picture.of(canvas)

    def resized(self, size: Size, resample: int) -> Picture:
        """Resized with one of Pillow's filters, whatever its aspect ratio was."""
        height, width = size
        if height * width > MAX_RESIZED_PIXELS:
            raise too_narrow(self.height, self.width, f"would be resized to {height:,} x {width:,}")
        return Picture(self.image.resize((width, height), resample=resample))

    def pixels(self) -> NDArray[np.uint8]:
        """uint8 ``[height, width, 3]``."""
        return np.asarray(self.image)

    def cut(self, size: Size) -> Iterator[NDArray[np.uint8]]:
        """Tiles of ``size``, row by row; those at the end may be smaller."""
        pixels = self.pixels()
        height, width = size
        for top in range(0, self.height, height):
            for left in range(0, self.width, width):
                yield pixels[top : top + height, left : left + width]


def too_narrow(height: int, width: int, what: str) -> RequestError:
    """The error for an image that this model's processor cannot take."""
    return RequestError(
        f"an image of {height:,} x {width:,} pixels (height x width) {what}: crop it, or pad it "
        "to a less narrow one"
    )


def joined(parts: Sequence[str | int]) -> list[str | int]:
    """Neighbouring texts as one text, and numbers as their sum."""
    found: list[str | int] = []
    for kind, group in itertools.groupby(parts, type):
        items: list[Any] = list(group)
        found.append("".join(items) if kind is str else sum(items))
    return [part for part in found if part != ""]


__all__ = [
    "BICUBIC",
    "BILINEAR",
    "LANCZOS",
    "ImageProcessor",
    "Picture",
    "Size",
    "Tiling",
    "joined",
    "too_narrow",
]
