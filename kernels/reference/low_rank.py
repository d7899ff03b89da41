"""Low-rank adapters of a product: the oracle of the other backends' kernels."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.low_rank import Factors, Shape, Update
from sdk.kernels.reference.linear import multiply


class LowRank:
    """See :class:`sdk.kernels.operators.low_rank.LowRankKernel`."""

    name = "reference.low_rank"

    def reject(self, problem: Problem) -> str | None:
        return None

    def table(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> ReferenceTable:
        return ReferenceTable(shape, dtype)


class ReferenceTable:
    """See :class:`sdk.kernels.operators.low_rank.Table`."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype
        self._slots: list[Update | None] = [None] * shape.slots

    def factor_bytes(self, rank: int, first: int, count: int) -> int:
        return rank * (self._shape.in_features + count) * self._dtype.itemsize

    def place(self, factors: Factors, memory: Tensor) -> Factors:
        return place_plain(factors, memory)

    def write(self, slot: int, update: Update | None) -> None:
        self._slots[slot] = update

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        for slot, update in enumerate(self._slots):
            rows = torch.nonzero(slots == slot).flatten()
            if update is None or not len(rows):
                continue
            total = y[rows].float()
            for part in update.factors:
                a, b = part.a.float(), part.b.float()
                if part.scales is not None:
                    b = b * part.scales
                low = a[:, x[rows]].t() if self._shape.of_ids else multiply(x[rows].float(), a)
                total[:, part.first : part.first + len(b)] += multiply(low * part.scale, b)
            if update.bias is not None:
                total += update.bias
            y[rows] = total.to(y.dtype)


def place_plain(factors: Factors, memory: Tensor) -> Factors:
    """Factors copied into the beginning of ``memory``, ``a`` and then ``b``, as they are."""
    a, b = factors.a, factors.b
    values = memory[: (a.numel() + b.numel()) * a.element_size()].view(a.dtype)
    first, second = torch.split(values, [a.numel(), b.numel()])
    first.view(a.shape).copy_(a)
    second.view(b.shape).copy_(b)
    return factors._replace(a=first.view(a.shape), b=second.view(b.shape))
