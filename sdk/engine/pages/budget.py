"""One byte budget for pages, frames of window groups and slots of states.

Each kind of memory hands out places by id and has an address range for all of them, but only those
it was *granted* have memory; the others are withheld. What all kinds were granted never exceeds the
budget. Memory moves between kinds: one withholds places without an owner, and another is granted
places of as many bytes.

*Order.* What was granted to nobody goes first, then places without content, of any kind. Then, if
the kind that lacks memory has less than its share of the budget, cached content of kinds that have
more than theirs. Then it evicts its own. Content of kinds below their share goes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

#: Places are granted this many at a time where that costs no content: every move is a system call.
_AT_LEAST = 8


class Places(Protocol):
    """One kind of memory. ``unit_bytes``: of a place, 0 if a place takes none."""

    unit_bytes: int

    @property
    def capacity(self) -> int:
        """Places with memory."""

    @property
    def num_withheld(self) -> int:
        """Places without memory."""

    @property
    def num_spare(self) -> int:
        """Places that no owner has or was promised, cached ones included. Negative: more were
        promised than there are."""

    @property
    def num_unused(self) -> int:
        """Those of them that have no content."""

    def take_away(self, count: int) -> list[int]:
        """Withhold up to ``count`` spare places, those without content first; returns them."""

    def give(self, count: int) -> list[int]:
        """Grant up to ``count`` withheld places; returns them."""


class Budget:
    """Moves memory between ``kinds``, which together get ``nbytes`` at most. Not thread-safe.

    ``shares``: of each kind, at least this part stays if it is in use or cached. ``nbytes`` None:
    nothing moves, and every kind has all its places.
    """

    def __init__(self, nbytes: int | None, kinds: Sequence[Places], shares: Sequence[float]):
        self.nbytes = nbytes
        self._kinds = list(kinds)
        self._shares = list(shares)
        #: Places that lost their memory since :meth:`take_vacated` was called.
        self._vacated: list[set[int]] = [set() for _ in kinds]
        for kind in kinds:  # places that take no memory, or all of them
            if nbytes is None or not kind.unit_bytes:
                kind.give(kind.num_withheld)

    @property
    def granted(self) -> int:
        """Bytes that the kinds have."""
        return sum(kind.capacity * kind.unit_bytes for kind in self._kinds)

    @property
    def _free(self) -> int:
        return 0 if self.nbytes is None else self.nbytes - self.granted

    def missing(self, needs: Sequence[int]) -> int:
        """How many bytes are missing if each kind needs so many spare places; 0 if they can all be
        had. Changes nothing."""
        free, missing = self._free, 0
        for kind, need in zip(self._kinds, needs, strict=True):
            lacking = need - kind.num_spare
            if lacking > 0 and (self.nbytes is None or lacking > kind.num_withheld):
                have = 0 if self.nbytes is None else kind.num_withheld
                missing += (lacking - have) * max(kind.unit_bytes, 1)
            free -= lacking * kind.unit_bytes
        if self.nbytes is not None:
            missing = max(missing, -free)
        return missing

    def missing_unused(self, needs: Sequence[int]) -> int:
        """How many bytes are missing if each kind needs so many places without content; negative:
        more than enough are there."""
        missing = -self._free
        for kind, need in zip(self._kinds, needs, strict=True):
            lacking = need - kind.num_unused
            missing += min(lacking, kind.num_withheld) * kind.unit_bytes
        return missing

    def obtain(self, needs: Sequence[int]) -> bool:
        """See to it that each kind has so many spare places. All or nothing."""
        if self.missing(needs):
            return False
        if self.nbytes is None:
            return True
        for index, need in enumerate(needs):
            if need > self._kinds[index].num_unused:
                self._obtain_one(index, need, needs)
        for index, kind in enumerate(self._kinds):
            lacking = needs[index] - kind.num_spare
            if lacking > 0:  # evict what others have cached
                self._collect(index, lacking * kind.unit_bytes, needs, cached=True)
                self._give(index, lacking)
        return True

    def obtain_unused(self, kind: Places, count: int) -> None:
        """Try to get ``count`` places without content for one kind, evicting nothing that others
        need more."""
        if self.nbytes is not None:
            needs = [0] * len(self._kinds)
            index = self._kinds.index(kind)
            self._obtain_one(index, count, needs)

    def grow(self, nbytes: int) -> None:
        """This many more bytes are there."""
        if self.nbytes is not None:
            self.nbytes += nbytes

    def shrink(self, nbytes: int) -> int:
        """Do without ``nbytes``, as far as places have no owner; returns how many those are. Places
        without content go first."""
        if self.nbytes is None:
            return 0
        for cached in (False, True):
            self._collect(-1, nbytes, [0] * len(self._kinds), cached=cached)
        nbytes = max(min(nbytes, self._free), 0)
        self.nbytes -= nbytes
        return nbytes

    def _obtain_one(self, index: int, need: int, needs: Sequence[int]) -> None:
        kind = self._kinds[index]
        missing = max(need, _AT_LEAST) - kind.num_unused
        self._collect(index, missing * kind.unit_bytes, needs, cached=False)
        self._give(index, missing)
        missing = need - kind.num_unused
        if missing > 0 and self._excess(index) < 0:
            self._collect(index, missing * kind.unit_bytes, needs, cached=True, below=False)
            self._give(index, missing)

    def _excess(self, index: int) -> float:
        """Bytes of a kind beyond its share."""
        kind = self._kinds[index]
        return kind.capacity * kind.unit_bytes - self._shares[index] * (self.nbytes or 0)

    def _collect(
        self, index: int, nbytes: int, needs: Sequence[int], *, cached: bool, below: bool = True
    ) -> None:
        """Take memory from the other kinds (-1: all) until ``nbytes`` are free, as far as it can be
        had.

        ``cached``: also places with content. ``below``: also from kinds below their share.
        """
        while (missing := nbytes - self._free) > 0:
            best, most, count = -1, 0.0, 0
            for other, kind in enumerate(self._kinds):
                if other == index or not kind.unit_bytes:
                    continue
                places = kind.num_spare if cached else kind.num_unused
                left = places - max(needs[other], 0)
                excess = self._excess(other)
                if cached and not below:
                    left = min(left, int(excess / kind.unit_bytes))
                if left > 0 and (best < 0 or excess > most):
                    best, most, count = other, excess, left
            if best < 0:
                return
            kind = self._kinds[best]
            self._withhold(best, min(count, -(-missing // kind.unit_bytes)))

    def _withhold(self, index: int, count: int) -> None:
        self._vacated[index].update(self._kinds[index].take_away(count))

    def _give(self, index: int, count: int) -> None:
        kind = self._kinds[index]
        if kind.unit_bytes:
            count = min(count, self._free // kind.unit_bytes)
        if count > 0:
            self._vacated[index].difference_update(kind.give(count))

    def take_vacated(self) -> list[list[int]]:
        """For each kind the places that have lost their memory since the last call and have not got
        it back. The ranks may return it to the system once all plans so far have run."""
        found = [sorted(one) for one in self._vacated]
        for one in self._vacated:
            one.clear()
        return found

    def check(self) -> None:
        """Assert that the kinds have no more than the budget."""
        assert self.nbytes is None or self._free >= 0, "more memory was granted than there is"
