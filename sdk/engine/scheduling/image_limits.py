"""What the scheduler knows of a model's tower of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sdk.models.vision.image import ImageInput

#: Rows of a block of the image cache.
BLOCK_ROWS = 16


class ImageLimits(NamedTuple):
    """What the scheduler knows of a model's tower.

    ``rows``: of the image cache. ``layers``, ``hidden``: of the tower; ``patch``: pixels of a
    patch's side. ``max_patches``: of a run. ``both_ways``: the tokens of an image see one another
    both ways, in layers with windows of at least ``window`` tokens (0: there is none).
    ``span``: the most of them that a step has room for. ``token_id``: the placeholder.
    ``per_prompt``: images of one prompt, at most. ``axes``: positions have axes, so each span is
    the grid of a tile.
    """

    rows: int
    layers: int
    hidden: int
    patch: int
    max_patches: int
    token_id: int
    both_ways: bool = False
    window: int = 0
    span: int = 1 << 30
    per_prompt: int = 1 << 20
    axes: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the image cache."""
        return self.rows // BLOCK_ROWS

    @property
    def units(self) -> int:
        """Parts of a run: the embedding of patches, and each layer, the last with the projector."""
        return self.layers + 1

    def patches(self, image: ImageInput) -> int:
        """Of all tiles of an image."""
        return sum(self._tiles(image))

    def work(self, image: ImageInput) -> float:
        """Of one layer, in products of a patch with the layer's matrices: 12 ``hidden`` squared for
        a patch, and two for each pair of patches in attention."""
        return sum(count * (1 + count / (6 * self.hidden)) for count in self._tiles(image))

    def _tiles(self, image: ImageInput) -> Iterator[int]:
        for tile in image.tiles:
            yield tile.shape[0] // self.patch * (tile.shape[1] // self.patch)
