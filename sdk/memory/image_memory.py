"""The memory that reading images takes, as a plan has it."""

from __future__ import annotations

from typing import NamedTuple


class ImageMemory(NamedTuple):
    """``rows``: of the image cache; ``max_patches``: of a tile. The rest is in bytes, of all ranks
    together."""

    rows: int
    max_patches: int
    weights: int
    workspace: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.cache
