"""Memory cut into slabs, each room for one page of a ladder's first type, two halves or four
quarters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Slabs:
    """The free places of ``slabs``: whole ones, halves, quarters, by level and index.

    Two halves that are both free are one larger place.
    """

    def __init__(self, slabs: range, num_levels: int) -> None:
        self.free: list[dict[int, None]] = [{} for _ in range(num_levels)]
        self.free[0] = dict.fromkeys(reversed(slabs))

    def take(self, level: int) -> int | None:
        """A free place of exactly this level; the last one given back goes first."""
        return self.free[level].popitem()[0] if self.free[level] else None

    def cut(self, level: int) -> int:
        """A free place of this level, out of a larger one where there is none; it ``fits``."""
        index = self.take(level)
        if index is None:
            index = 2 * self.cut(level - 1)
            self.free[level][index + 1] = None
        return index

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether so many places of each level, the first first, could be cut now."""
        left = 0
        for free, count in zip(self.free, counts, strict=False):
            left = 2 * left + len(free) - count
            if left < 0:
                return False
        return True

    def give(self, level: int, index: int) -> None:
        """Give back a place, and with its other half the larger one, and so on."""
        while level and index ^ 1 in self.free[level]:
            del self.free[level][index ^ 1]
            level, index = level - 1, index >> 1
        self.free[level][index] = None

    def check(self, taken: Iterable[tuple[int, int]], slabs: range) -> None:
        """Assert that these places and the free ones are all of ``slabs``, each part once."""
        places = list(taken)
        places += [(level, index) for level, free in enumerate(self.free) for index in free]
        whole = 1 << len(self.free) - 1
        parts = [
            index * (whole >> level) + part
            for level, index in places
            for part in range(whole >> level)
        ]
        expected = list(range(slabs.start * whole, slabs.stop * whole))
        assert sorted(parts) == expected, "memory was lost or belongs to two"
