"""The last matrix of a model, which makes logits of hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.models.config import ModelConfig
    from sdk.models.layers import Projection


class Head:
    """Hidden states to logits over the whole vocabulary."""

    def __init__(self, linear: Projection, config: ModelConfig) -> None:
        self.linear = linear
        self.vocab_size = config.vocab_size
        self.scale = config.logits_scale
        self.softcap = config.final_softcap

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[R, hidden] -> [R, vocab]``, float32; ``out``: see :meth:`Decoder.logits`."""
        mesh = self.linear.mesh
        logits = self.linear(hidden, out)
        if mesh.group is not None:
            width = -(-self.vocab_size // mesh.size)  # of each rank, but for the last
            logits = self.linear.ops.all_gather(logits, mesh.group, width, self.vocab_size)
        logits = self.linear.ops.scale(logits, 1.0 / self.scale)
        if self.softcap is not None:
            logits = self.linear.ops.softcap(logits, self.softcap)
        return logits
