"""Tensor parallelism: the part of each layer that a rank has, and the two sums per layer.

A rank has whole attention heads. Key/value heads are distributed first, in ranges that differ by at
most one (3 heads on 2 ranks: 1 and 2); query heads follow their key head. With more ranks than
key/value heads several ranks have the same key/value head. The MLP is split in multiples of 256 (or
the next smaller power of two that divides its width), so that no quantization group is split. The
vocabulary is split in equal ranges, of which the last may be shorter.

Each block is one column-parallel product (outputs split), work on the rank's own part, and one
row-parallel product (inputs split) whose outputs are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from sdk.kernels.groups import Group
from sdk.quant.errors import AlignmentError


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The query heads and key/value heads of one rank, as ranges ``start : start + count``.

    ``kv_copies``: the number of ranks that have the same key/value heads.
    """

    start: int
    count: int
    kv_start: int
    kv_count: int
    kv_copies: int = 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank among ``size`` ranks, which exchange tensors over ``group``. One rank has none.

    ``redundant_experts``: ``None`` if every rank has a part of each expert. Otherwise it has whole
    experts, of which so many more than the model has are copies (models/expert_parallel.py).
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None
    redundant_experts: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"mesh: expected a rank in 0..{self.size - 1}, found {self.rank}")
        if self.size > 1 and self.group is None:
            raise ValueError(f"mesh: {self.size} ranks need a group")

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShard:
        """This rank's attention heads.

        :raises AlignmentError: not every rank would have heads.
        """
        if num_kv_heads >= self.size:
            group = num_heads // num_kv_heads
            start, end = self._run(num_kv_heads)
            return HeadShard(start * group, (end - start) * group, start, end - start)
        if self.size % num_kv_heads or num_heads % self.size:
            raise AlignmentError(
                f"cannot split {num_heads} query and {num_kv_heads} key/value heads over "
                f"{self.size} ranks: expected a tensor parallel size of at most {num_kv_heads}, or "
                f"a multiple of it that divides {num_heads}"
            )
        count = num_heads // self.size
        copies = self.size // num_kv_heads
        return HeadShard(self.rank * count, count, self.rank // copies, 1, copies)

    def columns(self, width: int) -> tuple[int, int]:
        """This rank's range ``(start, count)`` of an MLP's ``width`` features."""
        unit = 256
        while width % unit or width // unit < self.size:
            if unit == 1:
                raise AlignmentError(f"cannot split {width} features over {self.size} ranks")
            unit //= 2
        start, end = self._run(width // unit)
        return start * unit, (end - start) * unit

    def vocabulary(self, size: int) -> tuple[int, int]:
        """This rank's range ``(start, count)`` of the vocabulary."""
        step = -(-size // self.size)
        start = self.rank * step
        if (self.size - 1) * step >= size:
            raise AlignmentError(f"cannot split a vocabulary of {size} over {self.size} ranks")
        return start, min(step, size - start)

    def _run(self, count: int) -> tuple[int, int]:
        return self.rank * count // self.size, (self.rank + 1) * count // self.size
