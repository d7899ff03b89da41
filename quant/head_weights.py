"""The matrices of a layer's heads as one weight."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.bound import BoundHeads
from sdk.quant.weight import PackedWeight, StackedWeight, Weight


class HeadWeights(StackedWeight):
    """Stacked weights of one shape; each head of a row is multiplied by its own."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        super().__init__(parts)
        self._grouped: BoundHeads | None = None

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        super().bind(ops, activation_bits)
        self._group(ops)

    def shared(self, ops: Ops) -> HeadWeights:
        found = super().shared(ops)
        assert isinstance(found, HeadWeights)
        found._group(ops)
        return found

    def _group(self, ops: Ops) -> None:
        bound = [part.bound for part in self.parts if isinstance(part, PackedWeight)]
        assert len(bound) == len(self.parts)
        self._grouped = ops.latent.group(bound)

    def matmul_heads(self, x: Tensor, out: Tensor) -> Tensor:
        """See :meth:`sdk.kernels.weights.bound.BoundHeads.matmul`."""
        assert self._grouped is not None, "bind() the weight before matmul_heads()"
        return self._grouped.matmul(x, out)
