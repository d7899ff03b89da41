"""The matrices of a layer's routed experts as one weight."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.bound import BoundExperts
from sdk.quant.weight import PackedWeight, StackedWeight, Weight


class ExpertWeights(StackedWeight):
    """Stacked weights of one shape; each token is multiplied by those it is routed to.

    They are bound one by one, so that at most one of them exists twice while a model loads.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        super().__init__(parts)
        self._grouped: BoundExperts | None = None

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        super().bind(ops, activation_bits)
        self._group(ops)

    def shared(self, ops: Ops) -> ExpertWeights:
        found = super().shared(ops)
        assert isinstance(found, ExpertWeights)
        found._group(ops)
        return found

    def _group(self, ops: Ops) -> None:
        bound = [part.bound for part in self.parts if isinstance(part, PackedWeight)]
        self._grouped = ops.moe.group(bound) if len(bound) == len(self.parts) else None

    def replace(self, index: int, part: Weight) -> None:
        """Exchange one of the weights for another one that is bound."""
        assert self._ops is not None and part.shape == self.parts[index].shape
        self.parts = (*self.parts[:index], part, *self.parts[index + 1 :])
        self._group(self._ops)

    def forget(self) -> None:
        """Give up the packed weights: nobody multiplies with them."""
        self._grouped = None
        for part in self.parts:
            if isinstance(part, PackedWeight):
                part.forget()

    @property
    def grouped(self) -> BoundExperts | None:
        """The packed weights of all, if one product can read them."""
        return self._grouped

    @property
    def gates(self) -> bool:
        return self._grouped is not None and self._grouped.gates

    def matmul_routed(
        self, x: Tensor, routes: Routes, *, by_token: bool, activation: str = ""
    ) -> Tensor:
        """``[R, out]`` sorted by expert, for x ``[T, in]`` (``by_token``) or ``[R, in]``.

        One product for all experts if their layouts agree, else one per expert. ``activation``:
        only if it :attr:`gates`.
        """
        if self._grouped is not None:
            return self._grouped.matmul(x, routes, by_token=by_token, activation=activation)
        assert not activation
        assert self._ops is not None, "bind() the weight before matmul_routed()"
        out = self._ops.empty(routes.tokens.shape[0], self.parts[0].shape[0])
        for expert, rows, own in routes.parts(x, by_token):
            self.parts[expert].matmul(own, out[rows])
        return out
