"""Projections of single heads: each head of a row is multiplied by that head's own matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.parts import Matrix, Part
from sdk.quant.head_weights import HeadWeights

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.ops import Ops


class HeadProjection:
    """``y[t, h] = x[t, h] @ w[h].T`` for the heads of this rank."""

    #: None can have an adapter.
    parts: tuple[Part, ...] = ()

    def __init__(self, weight: HeadWeights, ops: Ops) -> None:
        self.weight, self.ops = weight, ops

    @property
    def matrix(self) -> Matrix:
        """What it multiplies with."""
        return Matrix(self.weight, None)

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """x ``[T, heads, in]`` into out ``[T, heads, out]``; both may be parts of wider heads."""
        return self.weight.matmul_heads(x, out)
