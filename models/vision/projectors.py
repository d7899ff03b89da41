"""What makes tokens of text of a tower's patches. Names of weights begin with ``model.projector``.

Every result depends on one tile alone, so images have the same bits alone and with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.norm import Norm
from sdk.models.vision.config import VisionConfig

if TYPE_CHECKING:
    from sdk.models.layers import Source

PATH = "model.projector"


class PooledLinear:
    """Average over squares of ``merge`` by ``merge`` patches, RMSNorm, one matrix (Gemma 3).

    ``offset``: added to the stored weight of the norm.
    """

    def __init__(self, source: Source, config: VisionConfig, *, offset: float) -> None:
        self.ops, self.merge = source.ops, config.merge
        width = config.tower.hidden_size
        weight = source.vector(f"{PATH}.norm.weight", width)
        self.norm = Norm(weight + offset if offset else weight, config.tower.norm_eps)
        self.linear = source.matrix(f"{PATH}.linear", config.hidden_size, width)

    def __call__(self, x: Tensor, shapes: Sequence[tuple[int, int]]) -> Tensor:
        """See :class:`sdk.models.vision.family.Projector`."""
        pooled = torch.cat([pool(one, shape, self.merge) for one, shape in tiles_of(x, shapes)])
        return self.linear(self.ops.norm(pooled, self.norm))


def tiles_of(x: Tensor, shapes: Sequence[tuple[int, int]]) -> list[tuple[Tensor, tuple[int, int]]]:
    """The rows of each tile, with its shape."""
    found, first = [], 0
    for rows, columns in shapes:
        found.append((x[first : first + rows * columns], (rows, columns)))
        first += rows * columns
    return found


def pool(x: Tensor, shape: tuple[int, int], side: int) -> Tensor:
    """Means over squares of ``side`` rows and columns, row by row."""
    rows, columns = shape[0] // side, shape[1] // side
    squares = x.view(shape[0], shape[1], -1)[: rows * side, : columns * side]
    return squares.reshape(rows, side, columns, side, -1).mean(dim=(1, 3)).flatten(0, 1)
