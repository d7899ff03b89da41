"""Pages that lie outside the KV cache: which prefix is in which slot, and what has to be copied.

The second tier of the prefix cache. A page that is thrown out of the pool leaves its content in a
slot, and a request whose prefix goes on there gets it back: 370 KB copied (SmolLM2, 16 tokens in
float16) instead of 16 tokens computed. A slot keeps its content when it is read, so that a page
which goes out again need not be copied again.

Here are names and numbers only; every rank has the bytes of its part (``swap_storage.py``). Copies
are noted in the order in which they must be made, and go into the next plan: first all of them,
then the step.

*Eviction.* The least recently stored or read first, and of one prefix its end before its beginning,
which is of no use without it. A full tier loses its oldest, and what is lost is computed again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from sdk.engine.pages import PageKey
from sdk.engine.plan import Swap


class SwapSpace:
    """The slots ``0 .. num_slots - 1`` and the pages in them.

    ``stored`` and ``loaded`` count pages copied out of and into the cache.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.stored = 0
        self.loaded = 0
        self._free = list(range(num_slots - 1, -1, -1))
        # digest -> what it is and where; least recently used first
        self._known: OrderedDict[bytes, tuple[PageKey, int]] = OrderedDict()
        self._swaps: list[Swap] = []

    @property
    def num_used(self) -> int:
        """Slots with something in them."""
        return len(self._known)

    def match(self, keys: Sequence[PageKey]) -> int:
        """How many of the first ``keys`` are here. Changes nothing."""
        count = 0
        for key in keys:
            found = self._known.get(key.digest)
            if found is None or found[0] != key:
                break
            count += 1
        return count

    def store(self, page: int, key: PageKey) -> None:
        """Keep the content of ``page``, which is about to get another."""
        if key.digest in self._known:
            return
        if self._free:
            slot = self._free.pop()
        elif self._known:
            _, (_, slot) = self._known.popitem(last=False)
        else:
            return  # all of it is being read
        self._known[key.digest] = key, slot
        self._swaps.append(Swap(page, slot, out=True))
        self.stored += 1

    def hold(self, keys: Iterable[PageKey]) -> dict[PageKey, int]:
        """Take these (from ``match``, just now) out of reach of ``store``, with their slots."""
        return {key: self._known.pop(key.digest)[1] for key in dict.fromkeys(keys)}

    def put_back(self, held: Mapping[PageKey, int]) -> None:
        """What was held is the most recently used now, its beginning last of all."""
        for key, slot in reversed(list(held.items())):
            self.drop(key.digest)  # stored again meanwhile
            self._known[key.digest] = key, slot

    def load(self, slot: int, page: int) -> None:
        """Put what a slot holds into ``page``."""
        self._swaps.append(Swap(page, slot, out=False))
        self.loaded += 1

    def take_swaps(self) -> tuple[Swap, ...]:
        """The copies noted since the last time, for the plan that is about to run."""
        swaps, self._swaps = tuple(self._swaps), []
        return swaps

    def forget(self, slots: Iterable[int]) -> None:
        """Make these slots unknown: whether their content was written is not."""
        gone = set(slots)
        for digest, (_, slot) in list(self._known.items()):
            if slot in gone:
                self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Forget a page whose content is not to be trusted, if it is here."""
        found = self._known.pop(digest, None)
        if found is not None:
            self._free.append(found[1])

    def clear(self) -> None:
        """Forget all of them."""
        self._free += [slot for _, slot in self._known.values()]
        self._known.clear()

    def check(self) -> None:
        """Assert that every slot is free or known, and once."""
        slots = [slot for _, slot in self._known.values()] + self._free
        assert sorted(slots) == list(range(self.num_slots)), "a slot is lost or used twice"
        assert all(digest == key.digest for digest, (key, _) in self._known.items())
