"""A matrix of a file that is read when it is bound to its kernel, some rows at a time.

The embedding of a small model with a large vocabulary has two thirds of its bytes. Read as a whole
it would be in memory twice, as in the file and packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.linear import gather_rows, slice_rows
from sdk.kernels.weights.layouts import Dense, Layout, Pieces
from sdk.kernels.weights.stored_rows import StoredRows
from sdk.quant.join import join
from sdk.quant.spec import QuantSpec
from sdk.quant.weight import PackedWeight, Side, Weight, weight_of


class UnreadWeight(PackedWeight):
    """``unread`` as a weight. Whatever needs its ``layout`` before it is bound reads all of it."""

    def __init__(self, unread: Pieces, spec: QuantSpec, stored: StoredRows | None = None) -> None:
        self.shape = unread.shape
        #: Where its rows are in the file, if they are stored as kernels may read them.
        self.stored = stored
        self._unread: Pieces | None = unread
        self._spec = spec
        self._layout = self._bound = None

    @property
    def spec(self) -> QuantSpec:
        return self._spec

    @property
    def layout(self) -> Layout:
        return self.pieces.whole() if self._bound is None else self._bound.layout()

    @property
    def pieces(self) -> Pieces:
        """Its rows; only before it is bound."""
        assert self._unread is not None, "this weight is bound"
        return self._unread

    def narrow(self, side: Side, start: int, count: int) -> Weight:
        if side == "in":
            return weight_of(self.layout).narrow(side, start, count)
        return super().narrow(side, start, count)

    def take_rows(self, start: int, count: int, step: int = 1) -> Weight:
        if step > 1:
            return weight_of(slice_rows(self.layout, start, start + count * step, step))
        read = self.pieces.read
        shape = (count, self.shape[1])
        part = replace(self.pieces, shape=shape, read=lambda at, rows: read(start + at, rows))
        return UnreadWeight(part, self._spec)

    def with_rows(self, rows: Tensor) -> Weight:
        return weight_of(self.layout).with_rows(rows)

    def reordered(self, order: Tensor) -> Weight:
        """Rows that change places are near each other, in one head: a piece reads a few more."""
        unread = self.pieces

        def read(start: int, count: int) -> Layout:
            rows = order[start : start + count]
            low, high = int(rows.numpy().min()), int(rows.numpy().max()) + 1
            return gather_rows(unread.read(low, high - low), rows - low)

        return UnreadWeight(replace(unread, read=read), self._spec)

    def joined(self, others: Sequence[Weight]) -> Weight | None:
        parts = [self, *(one for one in others if isinstance(one, UnreadWeight))]
        if len(parts) <= len(others):
            return super().joined(others)
        if any(one.spec != self._spec for one in parts):
            return None  # known without reading them, as Q4_K_M's q, k and v in half of its layers
        unread = [one.pieces for one in parts]

        def read(start: int, count: int) -> Layout:
            found = list(_rows(unread, start, count))
            whole = found[0] if len(found) == 1 else join(found)
            assert whole is not None  # they have one type
            return whole

        shape = (sum(one.shape[0] for one in unread), self.shape[1])
        return UnreadWeight(replace(self.pieces, shape=shape, read=read), self._spec)

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        if self._bound is None:
            self._bound = ops.linear(self.pieces, activation_bits)
            self._unread = None  # it refers to the file


def float_pieces(weight: Weight) -> Pieces | None:
    """The rows of a weight of plain floats in their own type; ``None`` for any other."""
    if not isinstance(weight, PackedWeight) or weight.spec.kind != "float":
        return None
    if isinstance(weight, UnreadWeight):
        return weight.pieces
    from sdk.kernels.cpu.weight_rounding import pieces_of

    layout = weight.layout
    return pieces_of(layout.values) if isinstance(layout, Dense) else None


def _rows(parts: Sequence[Pieces], start: int, count: int) -> Iterator[Layout]:
    """Rows ``start : start + count`` of matrices one after another."""
    for part in parts:
        low, high = max(start, 0), min(start + count, part.shape[0])
        if low < high:
            yield part.read(low, high - low)
        start -= part.shape[0]
