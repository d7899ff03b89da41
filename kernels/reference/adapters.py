"""Low-rank adapters of a product: the oracle of the other backends' kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.low_rank import Factors, Update
from sdk.kernels.reference.linear import multiply


class LowRank:
    """See :class:`sdk.kernels.low_rank.LowRankKernel`."""

    name = "reference.low_rank"

    def reject(self, problem: Problem) -> str | None:
        return None

    def table(self, slots: int, in_features: int, out_features: int) -> ReferenceTable:
        return ReferenceTable(slots)


class ReferenceTable:
    """See :class:`sdk.kernels.low_rank.Table`."""

    def __init__(self, slots: int) -> None:
        self._slots: list[Update | None] = [None] * slots

    def factor_bytes(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> int:
        return sum(rank * (inputs + count) for rank, inputs, count in shapes) * dtype.itemsize

    def place(self, factors: Factors, a: Tensor, b: Tensor, memory: Tensor) -> Factors:
        split = a.numel() * a.element_size()
        placed = [part.view(a.dtype) for part in memory.split([split, len(memory) - split])]
        placed[0].copy_(a.flatten())
        placed[1].copy_(b.flatten())
        return factors._replace(a=placed[0].view(a.shape), b=placed[1].view(b.shape))

    def write(self, slot: int, update: Update | None) -> None:
        self._slots[slot] = update

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        for slot, update in enumerate(self._slots):
            rows = torch.nonzero(slots == slot).flatten()
            if update is None or not len(rows):
                continue
            total = y[rows].float()
            for a, b, first, scale in update.factors:
                if x.is_floating_point():
                    low = multiply(x[rows].float(), a.float())
                else:
                    low = a.float()[:, x[rows]].t().contiguous()
                total[:, first : first + len(b)] += multiply(low * scale, b.float())
            if update.bias is not None:
                total += update.bias
            y[rows] = total.to(y.dtype)
