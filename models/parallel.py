"""Tensor parallelism: which part of a layer a rank owns, and the two sums that join the parts.

A rank owns whole attention heads. Key/value heads are dealt out first, in runs that differ by at
most one (3 heads on 2 ranks: 1 and 2), and the query heads follow their key head; with more ranks
than key/value heads each key/value head is kept by several ranks. The MLP is cut in runs of 256
(or the next smaller power of two that divides its width), so that a cut never falls inside a
quantization group; the vocabulary in equal runs, the last one shorter.

A layer is then one column-parallel product (outputs cut), work on the rank's own part, and one
row-parallel product (inputs cut) whose outputs are summed over the ranks: two sums per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sdk.quant.errors import AlignmentError


class Group(Protocol):
    """What carries tensors between ranks; every rank makes the same calls in the same order."""

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over all ranks, in place; the same bits on every rank."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in rank order; all of one shape."""


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The query heads and key/value heads of one rank, as runs ``start : start + count``.

    ``kv_copies``: how many ranks hold the same key/value heads.
    """

    start: int
    count: int
    kv_start: int
    kv_count: int
    kv_copies: int = 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place among ``size`` ranks. With ``size`` 1 nothing is sent and nothing cut."""

    rank: int = 0
    size: int = 1
    group: Group | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"mesh: expected a rank in 0..{self.size - 1}, found {self.rank}")
        if self.size > 1 and self.group is None:
            raise ValueError(f"mesh: {self.size} ranks need a group")

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place; returns ``x``."""
        if self.group is not None and self.size > 1:
            self.group.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """The ranks' tensors (of one shape) joined along ``dim``."""
        if self.group is None or self.size == 1:
            return x
        return torch.cat(self.group.all_gather(x.contiguous()), dim=dim)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShard:
        """This rank's attention heads.

        :raises AlignmentError: when the heads cannot be dealt out so that every rank has some.
        """
        if num_kv_heads >= self.size:
            group = num_heads // num_kv_heads
            start, end = self._run(num_kv_heads)
            return HeadShard(start * group, (end - start) * group, start, end - start)
        if self.size % num_kv_heads or num_heads % self.size:
            raise AlignmentError(
                f"cannot deal {num_heads} query and {num_kv_heads} key/value heads to {self.size} "
                f"ranks: expected a tensor parallel size of at most {num_kv_heads}, or a multiple "
                f"of it that divides {num_heads}"
            )
        count = num_heads // self.size
        copies = self.size // num_kv_heads
        return HeadShard(self.rank * count, count, self.rank // copies, 1, copies)

    def columns(self, width: int) -> tuple[int, int]:
        """This rank's run ``(start, count)`` of an MLP's ``width`` features."""
        unit = 256
        while width % unit or width // unit < self.size:
            if unit == 1:
                raise AlignmentError(f"cannot cut {width} features for {self.size} ranks")
            unit //= 2
        start, end = self._run(width // unit)
        return start * unit, (end - start) * unit

    def vocabulary(self, size: int) -> tuple[int, int]:
        """This rank's run ``(start, count)`` of the vocabulary."""
        step = -(-size // self.size)
        start = self.rank * step
        if (self.size - 1) * step >= size:
            raise AlignmentError(f"cannot cut a vocabulary of {size} for {self.size} ranks")
        return start, min(step, size - start)

    def _run(self, count: int) -> tuple[int, int]:
        return self.rank * count // self.size, (self.rank + 1) * count // self.size
