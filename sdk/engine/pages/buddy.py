"""Buddy allocation: each slab of memory holds one page of the first tier, two of the second or
four of the third.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BuddyAllocator:
    """The free blocks of ``slabs``: whole slabs, halves and quarters, by tier and index.

    Two free halves of a block are merged.
    """

    def __init__(self, slabs: range, num_tiers: int) -> None:
        self.free: list[dict[int, None]] = [{} for _ in range(num_tiers)]
        self.free[0] = dict.fromkeys(reversed(slabs))

    def take(self, tier: int) -> int | None:
        """A free block of exactly this tier, the one released last."""
        return self.free[tier].popitem()[0] if self.free[tier] else None

    def allocate(self, tier: int) -> int:
        """A block of this tier; splits a larger one if necessary. It must fit (``fits``)."""
        index = self.take(tier)
        if index is None:
            index = 2 * self.allocate(tier - 1)
            self.free[tier][index + 1] = None
        return index

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether ``counts`` blocks of the tiers, first tier first, can be allocated now."""
        left = 0
        for free, count in zip(self.free, counts, strict=False):
            left = 2 * left + len(free) - count
            if left < 0:
                return False
        return True

    def release(self, tier: int, index: int) -> None:
        """Give back a block; merges it with its other half if that is free, and so on."""
        while tier and index ^ 1 in self.free[tier]:
            del self.free[tier][index ^ 1]
            tier, index = tier - 1, index >> 1
        self.free[tier][index] = None

    def check(self, taken: Iterable[tuple[int, int]], slabs: range) -> None:
        """Assert that taken and free blocks together cover ``slabs`` exactly once."""
        blocks = list(taken)
        blocks += [(tier, index) for tier, free in enumerate(self.free) for index in free]
        whole = 1 << len(self.free) - 1
        parts = [
            index * (whole >> tier) + part
            for tier, index in blocks
            for part in range(whole >> tier)
        ]
        expected = list(range(slabs.start * whole, slabs.stop * whole))
        assert sorted(parts) == expected, "memory was lost or allocated twice"
