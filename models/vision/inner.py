"""What makes one row of a square of patches between two layers of a tower (MiniCPM-V 4.6).

The patches of a square attend to each other; then they lie side by side in an MLP, whose result is
added to their mean. They are neighbours: :func:`sdk.models.vision.patches.places`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.models.vision.config import VisionConfig

if TYPE_CHECKING:
    from sdk.models.source import Source

PATH = "model.inner"


class InnerMerger:
    """Its weights are ``model.inner.…``."""

    def __init__(self, source: Source, config: VisionConfig) -> None:
        tower = config.tower
        self.ops, self.square, self.heads = source.ops, config.inner**2, tower.num_heads
        self.scale, self.activation = tower.attention_scale, tower.activation
        width, wide = tower.hidden_size, tower.hidden_size * self.square
        inside = tower.intermediate_size * self.square
        self.norm = source.norm(f"{PATH}.norm")
        self.queries, self.keys, self.values, self.out = (
            source.matrix(f"{PATH}.{name}_proj", width, width) for name in "qkvo"
        )
        self.wide_norm = source.norm(f"{PATH}.wide_norm", wide)
        self.first = source.matrix(f"{PATH}.linear_1", inside, wide)
        self.second = source.matrix(f"{PATH}.linear_2", width, inside)

    def __call__(self, x: Tensor) -> Tensor:
        """x float32 ``[patches, width]``, whole squares -> float32 ``[squares, width]``."""
        ops, width = self.ops, x.shape[1]
        y = ops.norm(x, self.norm)
        q, k, v = (one(y).numpy(force=True) for one in (self.queries, self.keys, self.values))
        attended = torch.from_numpy(self._attended(q, k, v)).to(x.device)
        x = x + self.out(attended)
        means = x.view(-1, self.square, width).mean(dim=1)
        y = self.first(ops.norm(x.view(-1, width * self.square), self.wide_norm))
        return means + self.second(ops.activation(y, self.activation))

    def _attended(
        self, q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Attention within squares, float32 ``[patches, width]``. In numpy, key by key: 4 keys fill
        no page, and each sum is of one row, so that an image has the same bits alone and with
        others."""
        shape = (-1, self.square, self.heads, q.shape[1] // self.heads)
        q, k, v = (one.reshape(shape) for one in (q * np.float32(self.scale), k, v))
        each = [(q * k[:, key : key + 1]).sum(axis=-1) for key in range(self.square)]
        weights = np.stack(each)
        weights = np.exp(weights - weights.max(axis=0))
        weights /= weights.sum(axis=0)
        found = np.zeros(q.shape, np.float32)
        for key in range(self.square):
            found += weights[key][..., None] * v[:, key : key + 1]
        return found.reshape(len(q) * self.square, -1)
