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
from sdk.kernels.kv_tiers import page_id, page_tier

logger = logging.getLogger("sdk")


class SwapSpace:
    """``num_slots`` slots and the pages in them. A slot has room for a page of the first tier, or
    for several of lower ones. Slot ids are formed like page ids. ``copies``: the pool's list.

    ``stored`` and ``loaded`` count pages copied out of and into the cache, ``failed`` those that
    could not be written.
    """

    def __init__(self, num_slots: int, copies: list[Copy], num_tiers: int = 1) -> None:
        self.num_slots = num_slots
        self.stored = 0
        self.loaded = 0
        self.failed = 0
        self._copies = copies
        self._slabs = BuddyAllocator(range(num_slots), num_tiers)
        # digest -> key and slot; least recently used first
        self._known: OrderedDict[bytes, tuple[PageKey, int]] = OrderedDict()

    @property
    def num_used(self) -> int:
        """Slots with content."""
        return self.num_slots - len(self._slabs.free[0])

    def counts(self) -> list[int]:
        """Stored pages by tier."""
        slots = list(self._known.values())  # in one call: a step may run in another thread
        tiers = [page_tier(slot)[0] for _, slot in slots]
        return [tiers.count(tier) for tier in range(len(self._slabs.free))]

    def tier(self, key: PageKey) -> int:
        """The tier of a stored page."""
        return page_tier(self._known[key.digest][1])[0]

    def match(self, keys: Sequence[PageKey], lowest_tier: int = 0) -> int:
        """How many of the first ``keys`` are stored, none below a tier. Changes nothing."""
        count = 0
        for key in keys:
            found = self._known.get(key.digest)
            if found is None or found[0] != key or page_tier(found[1])[0] > lowest_tier:
                break
            count += 1
        return count

    def store(self, location: int, key: PageKey) -> None:
        """Copy out the page at ``location``, which is about to be overwritten."""
        tier, _ = page_tier(location)
        if key.digest in self._known:
            if self.tier(key) <= tier:
                return
            self.drop(key.digest)
        while not self._slabs.fits([0] * tier + [1]):
            if not self._known:
                return  # all slots are being read
            self._evict(tier)
        slot = page_id(tier, self._slabs.allocate(tier))
        self._known[key.digest] = key, slot
        self._copies.append(Swap(location, slot, out=True))
        self.stored += 1

    def _evict(self, tier: int) -> None:
        """Forget the oldest page, and its neighbours if a page of this tier is larger."""
        oldest, (_, slot) = next(iter(self._known.items()))
        smaller, index = page_tier(slot)
        if smaller <= tier:
            self.drop(oldest)
            return
        within = index >> smaller - tier
        for digest, (_, slot) in list(self._known.items()):
            smaller, index = page_tier(slot)
            if smaller > tier and index >> smaller - tier == within:
                self.drop(digest)

    def hold(self, keys: Iterable[PageKey]) -> dict[PageKey, int]:
        """Keep these (from ``match``, just now) from being evicted by ``store``; their slots."""
        return {key: self._known.pop(key.digest)[1] for key in dict.fromkeys(keys)}

    def put_back(self, held: Mapping[PageKey, int]) -> None:
        """Return held pages as the most recently used ones, the beginning of a prefix last."""
        for key, slot in reversed(list(held.items())):
            self.drop(key.digest)  # it may have been stored again meanwhile
            self._known[key.digest] = key, slot

    def load(self, slot: int, location: int) -> None:
        """Copy a slot's page to ``location``, which is in the same tier."""
        self._copies.append(Swap(location, slot, out=False))
        self.loaded += 1

    def forget(self, slots: Iterable[int]) -> None:
        """Forget the pages in these slots: it is unknown whether they were written."""
        gone = set(slots)
        for digest, (_, slot) in list(self._known.items()):
            if slot in gone:
                self.drop(digest)

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
        """Forget a page, if it is stored."""
        found = self._known.pop(digest, None)
        if found is not None:
            self._slabs.release(*page_tier(found[1]))

    def clear(self) -> None:
        """Forget all pages."""
        for digest in list(self._known):
            self.drop(digest)

    def check(self) -> None:
        """Assert that every slot is free or has one page."""
        slots = [page_tier(slot) for _, slot in self._known.values()]
        self._slabs.check(slots, range(self.num_slots))
        assert all(digest == key.digest for digest, (key, _) in self._known.items())
