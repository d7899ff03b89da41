"""What a model has pulled from a checkpoint: matrices with their biases, and vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.quant.weight import Weight


class Matrix(NamedTuple):
    """The weight and the bias of a projection.

    ``order``, int32 ``[out]``: column ``order[j]`` of the product is feature j, because the rows of
    this weight's layout cannot be moved. ``None``: the columns are in the model's order.
    """

    weight: Weight
    bias: Tensor | None
    order: Tensor | None = None

    def ordered(self, order: Tensor) -> Matrix:
        """With feature ``order[j]`` (int64 ``[out]``) in place j; only before the weight is bound.
        Rows are moved now, if the layout allows it, and else columns of each product."""
        weight = self.weight.reordered(order)
        if weight is None:
            return self._replace(order=order.to(torch.int32))
        return Matrix(weight, None if self.bias is None else self.bias[order])


class Tensors(NamedTuple):
    """What a model has pulled, by path."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Tensor]
