"""A table that stays in its file: see :mod:`sdk.kernels.weights.stored_rows`."""

from __future__ import annotations

from copy import copy

from sdk.kernels.backend import Choice
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rows
from sdk.kernels.weights.stored_rows import OpenRows, StoredRows, open_rows
from sdk.quant.spec import QuantSpec
from sdk.quant.unread import UnreadWeight
from sdk.quant.weight import Side, Weight


def by_row(weight: Weight) -> Weight:
    """A weight whose rows stay in its file, if they are stored so that kernels may read them."""
    if isinstance(weight, UnreadWeight) and weight.stored is not None:
        return StoredWeight(weight.stored, weight)
    return weight


class StoredWeight(Weight):
    """A weight that is looked up by row and never multiplied. It has no bytes in memory.

    ``whole``: the same, read when it is bound: where no kernel reads rows from the file.
    """

    def __init__(self, stored: StoredRows, whole: Weight) -> None:
        self.shape = stored.shape
        self._stored: StoredRows | None = stored
        self._whole: Weight | None = whole
        self._spec = whole.spec
        self._open: OpenRows | None = None

    @property
    def spec(self) -> QuantSpec:
        return self._spec

    @property
    def nbytes(self) -> int:
        return 0 if self._whole is None else self._whole.nbytes

    def dequantize(self) -> Tensor:
        assert self._whole is not None, "a table in its file has no values of its own"
        return self._whole.dequantize()

    def narrow(self, side: Side, start: int, count: int) -> Weight:
        assert self._whole is not None
        return self._whole.narrow(side, start, count)

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        if self._stored is None or self._whole is None:
            return
        self._open = open_rows(self._stored, ops.context)
        if self._open is None:
            self._whole.bind(ops, activation_bits)
        else:
            self._whole = None
        self._stored = None

    def shared(self, ops: Ops) -> Weight:
        found = copy(self)
        if self._open is not None:
            found._open = self._open.shared(ops.context)
        else:
            assert self._whole is not None
            found._whole = self._whole.shared(ops)
        return found

    def matmul(self, x: Rows, out: Tensor | None = None, activation: str = "") -> Tensor:
        raise NotImplementedError("a table is looked up by row")

    def rows(self, ids: Tensor, part: tuple[int, int] | None = None) -> Tensor:
        if self._open is None:
            assert self._whole is not None
            return self._whole.rows(ids, part)
        assert part is None, "every rank has the whole table"
        return self._open.rows(ids)

    def choices(self) -> list[Choice]:
        return [] if self._whole is None else self._whole.choices()
