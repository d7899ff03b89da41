"""Pages that lie outside the KV cache: which prefix is in which slot, and what has to be copied.

The second tier of the prefix cache. A page that is thrown out of the pool leaves its content in a
slot, and a request whose prefix goes on there gets it back: 370 KB copied (SmolLM2, 16 tokens in
float16) instead of 16 tokens computed. A slot keeps its content when it is read, so that a page
which goes out again need not be copied again.

Here are names and numbers only; every rank has the bytes of its part (``swap_storage.py``). Copies
are noted where the pool notes its moves, in the order in which they must be made, and go into the
next plan: first all of them, then the step.

*Ladders.* A page goes out in the type that it has then, most often the lowest, into a slot of that
type: a quarter of a slot for one of int4. It comes back in that type, the same bits in as little
room: to code it as the first type would take four times the room and bring nothing back of what it
lost. Of two copies with the same in them the better is kept.

*Eviction.* The least recently stored or read first, and of one prefix its end before its beginning,
which is of no use without it. A full tier loses its oldest, and what is lost is computed again.
Where a page needs the room of several smaller ones, those beside the oldest go with it: at most
four for one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from sdk.engine.pages.page_pool import PageKey
from sdk.engine.pages.slabs import Slabs
from sdk.engine.plan import Copy, Swap
from sdk.kernels.ladder import page_id, page_level

logger = logging.getLogger("sdk")


class SwapSpace:
    """``num_slots`` slots of a page of the first type each, or of smaller ones of ``num_levels``,
    and the pages in them. Slots are named like pages; ``copies`` is where they are noted.

    ``stored`` and ``loaded`` count pages copied out of and into the cache, ``failed`` those that
    could not be written.
    """

    def __init__(self, num_slots: int, copies: list[Copy], num_levels: int = 1) -> None:
        self.num_slots = num_slots
        self.stored = 0
        self.loaded = 0
        self.failed = 0
        self._copies = copies
        self._slabs = Slabs(range(num_slots), num_levels)
        # digest -> what it is and where; least recently used first
        self._known: OrderedDict[bytes, tuple[PageKey, int]] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Slots with something in them."""
        return self.num_slots - len(self._slabs.free[0])

    def counts(self) -> list[int]:
        """Pages that are here, by level."""
        slots = list(self._known.values())  # at once: a step may run in another thread
        levels = [page_level(slot)[0] for _, slot in slots]
        return [levels.count(level) for level in range(len(self._slabs.free))]

    def level(self, key: PageKey) -> int:
        """Of a page that is here."""
        return page_level(self._known[key.digest][1])[0]

    def match(self, keys: Sequence[PageKey], deepest: int = 0) -> int:
        """How many of the first ``keys`` are here, none below a level. Changes nothing."""
        count = 0
        for key in keys:
            found = self._known.get(key.digest)
            if found is None or found[0] != key or page_level(found[1])[0] > deepest:
                break
            count += 1
        return count

    def store(self, place: int, key: PageKey) -> None:
        """Keep what lies at ``place``, which is about to get something else."""
        level, _ = page_level(place)
        if key.digest in self._known:
            if self.level(key) <= level:
                return
            self.drop(key.digest)
        while not self._slabs.fits([0] * level + [1]):
            if not self._known:
                return  # all of it is being read
            self._evict(level)
        slot = page_id(level, self._slabs.cut(level))
        self._known[key.digest] = key, slot
        self._copies.append(Swap(place, slot, out=True))
        self.stored += 1

    def _evict(self, level: int) -> None:
        """Forget the oldest, and where a page of this level takes more room what lies beside it."""
        oldest, (_, slot) = next(iter(self._known.items()))
        smaller, index = page_level(slot)
        if smaller <= level:
            self.drop(oldest)
            return
        within = index >> smaller - level
        for digest, (_, slot) in list(self._known.items()):
            smaller, index = page_level(slot)
            if smaller > level and index >> smaller - level == within:
                self.drop(digest)

    def hold(self, keys: Iterable[PageKey]) -> dict[PageKey, int]:
        """Take these (from ``match``, just now) out of reach of ``store``, with their slots."""
        return {key: self._known.pop(key.digest)[1] for key in dict.fromkeys(keys)}

    def put_back(self, held: Mapping[PageKey, int]) -> None:
        """What was held is the most recently used now, its beginning last of all."""
        for key, slot in reversed(list(held.items())):
            self.drop(key.digest)  # stored again meanwhile
            self._known[key.digest] = key, slot

    def load(self, slot: int, place: int) -> None:
        """Put what a slot holds to ``place``, of the same level."""
        self._copies.append(Swap(place, slot, out=False))
        self.loaded += 1

    def forget(self, slots: Iterable[int]) -> None:
        """Make these slots unknown: whether their content was written is not."""
        gone = set(slots)
        for digest, (_, slot) in list(self._known.items()):
            if slot in gone:
                self.drop(digest)

    def lose(self, unwritten: Mapping[int, str]) -> None:
        """Forget slots that could not be written, by why: their pages are computed again."""
        if unwritten and not self.failed:
            logger.warning(
                "swap_path: a KV page cannot be written to the swap file (%s); such pages are "
                "dropped and computed again when they are needed; get_metrics()['swap_failed'] "
                "counts them",
                next(iter(unwritten.values())),
            )
        self.failed += len(unwritten)
        self.forget(unwritten)

    def drop(self, digest: bytes) -> None:
        """Forget a page whose content is not to be trusted, if it is here."""
        found = self._known.pop(digest, None)
        if found is not None:
            self._slabs.give(*page_level(found[1]))

    def clear(self) -> None:
        """Forget all of them."""
        for digest in list(self._known):
            self.drop(digest)

    def check(self) -> None:
        """Assert that every slot is free or known, and once."""
        slots = [page_level(slot) for _, slot in self._known.values()]
        self._slabs.check(slots, range(self.num_slots))
        assert all(digest == key.digest for digest, (key, _) in self._known.items())
