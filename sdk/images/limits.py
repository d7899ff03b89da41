"""How large an image may be, checked before it is decoded."""

from __future__ import annotations

from typing import NamedTuple

from sdk.api.errors import RequestError


class ImageLimits(NamedTuple):
    """What an image may have at most. Each limit is checked before the memory is taken.

    Decoding takes 7 to 16 bytes of memory per pixel for a moment, and 3 more to turn an image: up
    to 1.3 GB at the default limits. An array of 3 bytes per pixel remains.
    """

    #: Bytes of the file, compressed.
    max_bytes: int = 64 * 2**20
    #: Pixels; the default holds a photo of 8192 x 8192.
    max_pixels: int = 2**26
    #: Pixels of a side. A resize takes memory in proportion to it, beside that of the pixels.
    max_side: int = 2**16 - 1


def check_bytes(count: int, name: str, limits: ImageLimits) -> None:
    """:raises RequestError: a file of ``count`` bytes is too large."""
    if count > limits.max_bytes:
        raise RequestError(
            f"{name} has {count:,} bytes, expected at most {limits.max_bytes:,}: save it smaller"
        )
    if count == 0:
        raise RequestError(f"{name} is empty, expected the bytes of an image")


def check_size(height: int, width: int, name: str, limits: ImageLimits) -> None:
    """:raises RequestError: an image of these sides has no pixels, or too many."""
    if height < 1 or width < 1:
        raise RequestError(f"{name} has {height} x {width} pixels, expected at least 1 x 1")
    if height * width > limits.max_pixels:
        raise RequestError(
            f"{name} has {height} x {width} = {height * width:,} pixels, expected at most "
            f"{limits.max_pixels:,}: scale it down"
        )
    if max(height, width) > limits.max_side:
        raise RequestError(
            f"{name} has {height} x {width} pixels, expected sides of at most "
            f"{limits.max_side:,}: crop it"
        )


__all__ = ["ImageLimits", "check_bytes", "check_size"]
