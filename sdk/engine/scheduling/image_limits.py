"""What the scheduler knows of a model's tower of images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sdk.models.vision.image import ImageInput

#: Rows of a block of the image cache.
BLOCK_ROWS = 16
#: Patches of the tiles that the tower runs together, unless one has more (models/vision/patches.py;
#: a test compares them).
GROUP_PATCHES = 4096
#: Images are encoded together up to this many patches: beyond it a product computes for longer than
#: it reads the weights.
JOINT_PATCHES = 1024


class ImageLimits(NamedTuple):
    """What the scheduler knows of a model's tower.

    ``rows``: of the image cache. ``layers``, ``hidden``: of the tower; ``patch``: pixels of a
    patch's side. ``max_patches``: of a tile. ``both_ways``: the tokens of an image see one another
    both ways, in layers with windows of at least ``window`` tokens (0: there is none).
    ``whole_prompt``: so do all tokens of a prompt with images.
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
    whole_prompt: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the image cache."""
        return self.rows // BLOCK_ROWS

    def units(self, images: Iterable[ImageInput]) -> int:
        """Parts of a run: each layer of each group of tiles."""
        groups, patches = 0, GROUP_PATCHES
        for image in images:
            for count in self.tiles(image):
                if patches + count > GROUP_PATCHES:
                    groups, patches = groups + 1, 0
                patches += count
        return groups * self.layers

    def work(self, image: ImageInput) -> float:
        """Of one layer, in products of a patch with the layer's matrices: 12 ``hidden`` squared for
        a patch, and two for each pair of patches in attention."""
        return sum(count * (1 + count / (6 * self.hidden)) for count in self.tiles(image))

    def tiles(self, image: ImageInput) -> Iterator[int]:
        """The patches of each tile."""
        for tile in image.tiles:
            yield tile.shape[0] // self.patch * (tile.shape[1] // self.patch)
