"""Pools the hidden states of one request, which come in parts if its prompt runs in chunks.

The result does not depend on where a prompt was cut: the mean adds row after row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from sdk.engine.plan import Pooled, Pooling
from sdk.kernels.lazy_torch import Tensor, torch

#: What the sum of ``n`` hidden states is divided by. Weights are 1 to n with "weightedmean".
_SUMS: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "mean": float,
        "mean_sqrt_len": math.sqrt,
        "weightedmean": lambda count: count * (count + 1) / 2,
    }
)


class Pooler:
    """The hidden states of a prompt so far, pooled."""

    __slots__ = ("_count", "_kept", "_sum", "pooling")

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._kept: list[Tensor] = []  # copies: the next step overwrites hidden states
        self._sum: NDArray[np.float64] | None = None
        self._count = 0

    def add(self, rows: Tensor) -> None:
        """The next hidden states, float32 ``[n, hidden]``."""
        mode = self.pooling.mode
        if mode in _SUMS:
            self._add_to_sum(rows)
        elif mode == "token":
            self._kept.append(rows.clone())
        elif mode == "max":
            self._kept = [torch.cat([*self._kept, rows]).amax(0, keepdim=True)]
        elif mode == "last" or not self._kept:
            self._kept = [rows[-1:].clone() if mode == "last" else rows[:1].clone()]

    def _add_to_sum(self, rows: Tensor) -> None:
        # In float64, and one after another: another order of the additions would give other bits.
        # numpy adds the rows of a matrix in their order.
        values = rows.cpu().numpy().astype(np.float64)
        first = self._count + 1
        self._count += len(values)
        if self.pooling.mode == "weightedmean":
            values *= np.arange(first, self._count + 1, dtype=np.float64)[:, None]
        if self._sum is not None:
            values = np.concatenate([self._sum[None], values])
        self._sum = np.add.reduce(values, axis=0)

    def result(self) -> Tensor:
        """The pooled vector float32 ``[hidden]``; all rows ``[tokens, hidden]`` for "token"."""
        if self._sum is not None:
            mean = self._sum / _SUMS[self.pooling.mode](self._count)
            found = torch.from_numpy(mean.astype(np.float32))
        else:
            found = torch.cat(self._kept)
            if self.pooling.mode != "token":
                found = found[0]
        return _unit(found) if self.pooling.normalize else found


def _unit(x: Tensor) -> Tensor:
    """Rows of length 1. numpy's sums, so that the bits are the same with and without torch."""
    values = x.cpu().numpy().astype(np.float64)
    length = np.sqrt(np.square(values).sum(-1, keepdims=True))
    return torch.from_numpy((values / np.maximum(length, 1e-12)).astype(np.float32))


def as_numbers(result: Tensor) -> Pooled:
    """A vector as a list, a matrix as an array."""
    if result.ndim == 1:
        numbers: list[float] = result.tolist()
        return numbers
    return result.cpu().numpy()
