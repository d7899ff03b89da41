"""A weight whose columns are stored in another order than its input features.

Quantizers that visit columns by importance (``desc_act``, "act-order") store a group index for
each column. Here columns are sorted by group, so that a group is a run of columns, as every kernel
expects, and the input is permuted before the product. This costs 4 bytes per column and one pass
over a row of activations, instead of a scale looked up for every weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from sdk.kernels.backend import Choice
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rows
from sdk.kernels.weights.layouts import Layout
from sdk.quant.errors import AlignmentError
from sdk.quant.spec import QuantSpec
from sdk.quant.weight import PackedWeight, Side, Weight, concat


@dataclass(frozen=True, slots=True)
class Permuted:
    """A layout whose column ``j`` is column ``order[j]`` of the matrix; order int32 ``[K]``."""

    layout: Layout
    order: Tensor


class PermutedWeight(Weight):
    """``inner``, whose columns are permuted by ``order`` (int32 ``[in]``)."""

    def __init__(self, inner: Weight, order: Tensor) -> None:
        assert order.dtype == torch.int32 and order.shape == inner.shape[1:]
        self.shape = inner.shape
        self.inner = inner
        self.inputs = inner.inputs
        self.order = order
        self._ops: Ops | None = None

    @property
    def spec(self) -> QuantSpec:
        return self.inner.spec

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.order.nbytes

    def dequantize(self) -> Tensor:
        return self._back(self.inner.dequantize())

    def narrow(self, side: Side, start: int, count: int) -> Weight:
        if side == "out":
            return PermutedWeight(self.inner.narrow(side, start, count), self.order)
        if (start, count) == (0, self.shape[1]):
            return self
        raise AlignmentError(
            f"cannot cut in features {start}..{start + count}: this weight's columns are sorted by "
            f"group (desc_act), and its groups are spread over all {self.shape[1]}"
        )

    def with_rows(self, rows: Tensor) -> Weight:
        """See :meth:`PackedWeight.with_rows`."""
        assert isinstance(self.inner, PackedWeight), "its rows are moved before it is joined"
        return PermutedWeight(self.inner.with_rows(rows), self.order)

    def joined(self, others: Sequence[Weight]) -> Weight | None:
        """One weight if all have the same order, as quantizers store weights of one input."""
        inner = [self.inner]
        for other in others:
            if not isinstance(other, PermutedWeight) or not torch.equal(other.order, self.order):
                return None
            inner.append(other.inner)
        return PermutedWeight(concat(inner), self.order)

    def reordered(self, order: Tensor) -> Weight | None:
        inner = self.inner.reordered(order)
        return None if inner is None else PermutedWeight(inner, self.order)

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        self._ops = ops
        self.order = self.order.to(ops.device)
        self.inner.bind(ops, activation_bits)

    def shared(self, ops: Ops) -> PermutedWeight:
        found = copy(self)
        found._ops, found.inner = ops, self.inner.shared(ops)
        return found

    @property
    def gates(self) -> bool:
        return self.inner.gates

    def matmul(self, x: Rows, out: Tensor | None = None, activation: str = "") -> Tensor:
        assert self._ops is not None, "bind() the weight before matmul()"
        assert isinstance(x, Tensor), "columns of codes are not permuted"
        return self.inner.matmul(self._ops.take_columns(x, self.order), out, activation)

    def rows(self, ids: Tensor, part: tuple[int, int] | None = None) -> Tensor:
        found = self.inner.rows(ids, part)
        if self._ops is None:
            return self._back(found)
        return self._ops.take_columns(found, self.order, back=True)

    def choices(self) -> list[Choice]:
        return self.inner.choices()

    def _back(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[:, self.order.long()] = x
        return out
