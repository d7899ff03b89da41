"""The tokens of images in the keys of pages.

Prefixes are found by their token ids, but the placeholders of all images have one id. So in keys
and tails a row of an image counts as a number outside of every vocabulary, made of the image's
digest and the row's number: the same image after the same tokens is a hit, another one is not.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sdk.models.vision.image import PromptImage

_MASK = (1 << 62) - 1


class PlacedImage(NamedTuple):
    """What a prefix knows of an image: its digest, and where its rows are, as in
    :class:`sdk.models.vision.image.PromptImage`."""

    digest: bytes
    spans: tuple[tuple[int, int], ...]


def placed(images: Iterable[PromptImage]) -> list[PlacedImage]:
    return [PlacedImage(one.image.digest, one.spans) for one in images]


def placed_before(end: int, images: Iterable[PlacedImage]) -> tuple[PlacedImage, ...]:
    """The images, or their first rows, among the first ``end`` tokens."""
    found = []
    for digest, spans in images:
        if kept := [(first, min(count, end - first)) for first, count in spans if first < end]:
            found.append(PlacedImage(digest, tuple(kept)))
    return tuple(found)


def image_ids(digest: bytes, count: int) -> list[int]:
    """Negative numbers for the first rows of an image: each of 62 bits of a hash of its digest."""
    found = array("q")
    found.frombytes(hashlib.shake_128(digest).digest(8 * count))
    return [~(number & _MASK) for number in found]


def whole_ids(ids: Sequence[int]) -> list[int]:
    """The ids of a prompt whose tokens see each other both ways: what its first tokens are depends
    on the last ones, so the first id stands for all."""
    digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=32).digest()
    return [*image_ids(digest, 1), *ids[1:]]


def key_ids(token_ids: Sequence[int], images: Iterable[PlacedImage]) -> list[int]:
    """The ids of a prompt in keys."""
    found = list(token_ids)
    for digest, spans in images:
        ids, row = image_ids(digest, sum(count for _, count in spans)), 0
        for first, count in spans:
            found[first : first + count] = ids[row : row + count]
            row += count
    return found
