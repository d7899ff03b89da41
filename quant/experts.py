"""The matrices of all experts of a layer as one weight."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sdk.kernels.bound import BoundExperts
from sdk.kernels.ops import Ops
from sdk.kernels.routes import Routes
from sdk.quant.weight import PackedWeight, StackedWeight, Weight


class ExpertWeights(StackedWeight):
    """Weights of one shape one above the other, of which each token multiplies with some.

    Bound one by one, so that while a model loads at most one of them exists twice.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        super().__init__(parts)
        self._grouped: BoundExperts | None = None

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        super().bind(ops, activation_bits)
        bound = [part.bound for part in self.parts if isinstance(part, PackedWeight)]
        if len(bound) == len(self.parts):
            self._grouped = ops.moe.group(bound)

    def matmul_routed(self, x: Tensor, routes: Routes, *, by_token: bool) -> Tensor:
        """``[R, out]`` in the order of the experts, of x ``[T, in]`` (``by_token``) or ``[R, in]``.

        One product of all experts where they are of one kind; else one after another.
        """
        if self._grouped is not None:
            return self._grouped.matmul(x, routes, by_token=by_token)
        assert self._ops is not None, "bind() the weight before matmul_routed()"
        out = self._ops.empty(routes.tokens.shape[0], self.parts[0].shape[0])
        for expert, rows, own in routes.parts(x, by_token):
            self.parts[expert].matmul(own, out[rows])
        return out
