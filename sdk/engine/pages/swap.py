"""The swap space: pages outside the KV cache, which prefix is in which slot, and what to copy.

When a page is evicted from the pool, its content is copied into a slot. A request that needs this
prefix gets it back: 370 KB copied (SmolLM2, 16 tokens in float16) instead of 16 tokens computed. A
slot keeps its content when it is read, so a page that is evicted again need not be copied again.

This module has keys and slot numbers only; every rank has the bytes of its part
(``swap_storage.py``). Copies are appended to the pool's list of copies, in the order in which they
must be made. They go into the next plan, which makes all of them before its step.

*Tiers.* A page is swapped out in its current tier, most often the lowest, into a slot of that tier:
an int4 page takes a quarter of a slot. It is swapped in to the same tier with the same bits. The
first tier would take four times the memory and restore nothing of what the page lost. Of two copies
with the same key the one in the higher tier is kept.

*Frames and states* have the key of the page whose tokens they belong to, and a region each. A slot
is then a part of a place, and a place takes as many as its size needs (``places``), wherever they
are. The last page of a sequence that is not full is kept too, because its state is.

*Eviction.* The least recently stored or read page first, and a prefix's end before its beginning,
because the end is useless without it. What is evicted is computed again when it is needed. If a
page needs the memory of several smaller ones, the neighbours of the oldest are evicted with it: at
most four for one page.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from sdk.engine.pages.buddy import BuddyAllocator
from sdk.engine.pages.page_pool import PageKey
from sdk.engine.plan import Copy, Swap
from sdk.kernels.kv.tiers import page_id, page_tier

logger = logging.getLogger("sdk")

#: The slots of one place, in the order of its bytes.
Slots = tuple[int, ...]
#: What is being read: slots by key and region.
Holds = dict[tuple[PageKey, int], Slots]


class SwapSpace:
    """``num_slots`` slots and what is in them. A slot has room for a page of the first tier, or for
    several of lower ones. Slot ids are formed like page ids. ``copies``: the pool's list.
    ``places``: how many slots a place of each region takes. A key with fewer than ``page_size``
    tokens is that of a tail.

    ``stored`` and ``loaded`` count pages copied out of and into the cache, ``failed`` slots that
    could not be written.
    """

    def __init__(
        self,
        num_slots: int,
        copies: list[Copy],
        num_tiers: int = 1,
        places: Sequence[int] = (1,),
        page_size: int = 0,
    ) -> None:
        self.num_slots = num_slots
        self.stored = 0
        self.loaded = 0
        self.failed = 0
        self._copies = copies
        self._places = tuple(places)
        self._page_size = page_size
        #: Stored tails by the digest of the page before them.
        self._tails: dict[bytes, dict[bytes, PageKey]] = {}
        self._slabs = BuddyAllocator(range(num_slots), num_tiers)
        # digest and region -> key and slots; least recently used first
        self._known: OrderedDict[tuple[bytes, int], tuple[PageKey, Slots]] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Slots with content."""
        return self.num_slots - len(self._slabs.free[0])

    def counts(self) -> list[int]:
        """Stored pages by tier."""
        found = list(self._known.items())  # in one call: a step may run in another thread
        tiers = [page_tier(slots[0])[0] for (_, region), (_, slots) in found if not region]
        return [tiers.count(tier) for tier in range(len(self._slabs.free))]

    def tier(self, key: PageKey) -> int:
        """The tier of a stored page."""
        return page_tier(self._known[key.digest, 0][1][0])[0]

    def match(self, keys: Sequence[PageKey], lowest_tier: int = 0) -> int:
        """How many of the first ``keys`` are stored, none below a tier. Changes nothing."""
        count = 0
        for key in keys:
            if not self.has(key) or self.tier(key) > lowest_tier:
                break
            count += 1
        return count

    def has(self, key: PageKey, region: int = 0) -> bool:
        """Whether the page, or what belongs to it in another region, is stored."""
        found = self._known.get((key.digest, region))
        return found is not None and found[0] == key

    def tails_after(self, parent: bytes) -> list[PageKey]:
        """The stored tails of a page, the longest first."""
        found = self._tails.get(parent, {}).values()
        return sorted(found, key=lambda key: -len(key.token_ids))

    def store(self, location: int, key: PageKey, region: int = 0) -> None:
        """Copy out the place at ``location``, which is about to be overwritten."""
        tier, _ = page_tier(location)
        if (key.digest, region) in self._known:
            if region or self.tier(key) <= tier:
                return
            self._drop((key.digest, region))
        count = self._places[region]
        if count > self.num_slots:
            return
        while not self._slabs.fits([0] * tier + [count]):
            if not self._known:
                return  # all slots are being read
            self._evict(tier)
        slots = tuple(page_id(tier, self._slabs.allocate(tier)) for _ in range(count))
        self._remember(key, region, slots)
        self._copies.append(Swap(location, slots, out=True, region=region))
        self.stored += not region

    def _evict(self, tier: int) -> None:
        """Forget the oldest place, and its neighbours if a page of this tier is larger."""
        oldest, (_, slots) = next(iter(self._known.items()))
        smaller, index = page_tier(slots[0])
        if smaller <= tier:
            self._drop(oldest)
            return
        within = index >> smaller - tier
        for name, (_, slots) in list(self._known.items()):
            smaller, index = page_tier(slots[0])
            if smaller > tier and index >> smaller - tier == within:
                self._drop(name)

    def hold(self, places: Iterable[tuple[PageKey, int]]) -> Holds:
        """Keep these keys and regions (stored just now) from being evicted by ``store``; returns
        their slots."""
        return {
            (key, region): self._take((key.digest, region)) for key, region in dict.fromkeys(places)
        }

    def put_back(self, held: Holds) -> None:
        """Return what was held as the most recently used, the beginning of a prefix last."""
        for (key, region), slots in reversed(list(held.items())):
            self._drop((key.digest, region))  # it may have been stored again meanwhile
            self._remember(key, region, slots)

    def _remember(self, key: PageKey, region: int, slots: Slots) -> None:
        self._known[key.digest, region] = key, slots
        if not region and len(key.token_ids) < self._page_size:
            self._tails.setdefault(key.parent, {})[key.digest] = key

    def load(self, slots: Slots, location: int, region: int = 0) -> None:
        """Copy a stored place to ``location``, which is in the same tier."""
        self._copies.append(Swap(location, slots, out=False, region=region))
        self.loaded += not region

    def forget(self, slots: Iterable[int]) -> None:
        """Forget what is in these slots: it is unknown whether they were written."""
        gone = set(slots)
        if gone:
            for name, (_, own) in list(self._known.items()):
                if not gone.isdisjoint(own):
                    self._drop(name)

    def drop_unwritten(self, unwritten: Mapping[int, str]) -> None:
        """Forget slots that could not be written; ``unwritten`` has the reason for each."""
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
        """Forget a page with all that belongs to it, as far as it is stored."""
        for region in range(len(self._places)):
            self._drop((digest, region))

    def _drop(self, name: tuple[bytes, int]) -> None:
        if name in self._known:
            for slot in self._take(name):
                self._slabs.release(*page_tier(slot))

    def _take(self, name: tuple[bytes, int]) -> Slots:
        """Do not know a stored place any more; its slots are not free."""
        key, slots = self._known.pop(name)
        if not name[1] and (tails := self._tails.get(key.parent)) is not None:
            tails.pop(key.digest, None)
            if not tails:
                del self._tails[key.parent]
        return slots

    def clear(self) -> None:
        """Forget everything."""
        for name in list(self._known):
            self._drop(name)

    def check(self) -> None:
        """Assert that every slot is free or has one page."""
        slots = [page_tier(slot) for _, slots in self._known.values() for slot in slots]
        self._slabs.check(slots, range(self.num_slots))
        for (digest, region), (key, own) in self._known.items():
            assert digest == key.digest and len(own) == self._places[region], "slots differ"
        for parent, tails in self._tails.items():
            assert tails, "a page has no tails"
            for digest, key in tails.items():
                assert key.parent == parent and self._known[digest, 0][0] is key, "tails differ"
