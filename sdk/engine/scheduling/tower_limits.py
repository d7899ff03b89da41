"""What the scheduler knows of a model's tower of images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from sdk.models.vision.image import ImageInput

if TYPE_CHECKING:
    from sdk.models.vision.config import VisionConfig

#: Rows of a block of the image cache.
BLOCK_ROWS = 16
#: Images are encoded together up to this many patches: beyond it a product computes for longer than
#: it reads the weights.
JOINT_PATCHES = 1024


class TowerLimits(NamedTuple):
    """What the scheduler knows of a model's tower.

    ``rows``: of the image cache. ``max_patches``: of a tile. ``window``: of the layers in which the
    tokens of an image see one another both ways (0: there is none). ``span``: the most of them that
    a step has room for. ``per_prompt``: images of one prompt, at most.
    """

    rows: int
    vision: VisionConfig
    max_patches: int
    window: int = 0
    span: int = 1 << 30
    per_prompt: int = 1 << 20

    @property
    def both_ways(self) -> bool:
        """Whether the tokens of an image see one another both ways."""
        return self.vision.both_ways is not None

    @property
    def whole_prompt(self) -> bool:
        """Whether all tokens of a prompt with images see one another both ways."""
        return self.vision.both_ways == "prompt"

    @property
    def most_joined(self) -> int:
        """The most tokens that may see one another both ways."""
        return min(self.window or self.span, self.span)

    @property
    def num_blocks(self) -> int:
        """Blocks of the image cache."""
        return self.rows // BLOCK_ROWS

    def units(self, images: Iterable[ImageInput]) -> int:
        """Parts of a run (models/vision/portions.py)."""
        from sdk.models.vision.portions import groups, units  # with the first image

        patches = [count for image in images for count in self.tiles(image)]
        more = int(self.vision.class_token)
        return sum(
            units([patches[number] + more for number in group], self.vision)
            for group in groups(patches)
        )

    def work(self, image: ImageInput) -> float:
        """Of one layer, in products of a patch with the layer's matrices: 12 ``hidden`` squared for
        a patch, and two for each pair of patches in attention."""
        hidden = self.vision.tower.hidden_size
        return sum(count * (1 + count / (6 * hidden)) for count in self.tiles(image))

    def tiles(self, image: ImageInput) -> Iterator[int]:
        """The patches of each tile."""
        for tile in image.tiles:
            yield tile.shape[0] // self.vision.patch * (tile.shape[1] // self.vision.patch)
