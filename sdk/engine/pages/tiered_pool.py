"""A pool that stores old pages in fewer bits before it evicts any: ``float16>int8>int4``.

A page of each tier takes half the memory of a page of the tier above. Memory is divided into
*slabs* (``buddy.py``), each with room for one page of the first tier, two of the second or four of
the third. A page keeps its id while it is used or cached. Its *location* changes: the page id in
the kernels' page tables, which contains the tier. New pages are in the first tier, and only those
are written. A page that is swapped out is swapped in to the same tier.

*Making room.* Lossless first: two half-empty slabs become a full and an empty one. Then the coldest
page of the first tier moves one tier down, then the next coldest, until none is left that may; then
those of the second tier. Only then are cached pages evicted, as in any pool, and after that
requests are preempted. Coldest are the cached pages, in the order of eviction, then those of the
request that would be preempted first. Some pages stay in their tier: a request's first page, where
trained models put much of their attention, pages that are not full yet (``kv_keep``: more of them
at both ends), and those of requests with a ``kv_min_bits``. No page moves back up.

*No request starves.* No page ever takes more than a slab. So the first request in order still gets
all the pages it may need once all other requests are gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from sdk.api.errors import RequestError
from sdk.engine.pages.buddy import BuddyAllocator
from sdk.engine.pages.page_pool import PageKey, PagePool
from sdk.engine.plan import Move, StepPlan
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.kernels.kv.tiers import page_id, page_tier
from sdk.quant.spec import KVSpec


class TieredPagePool(PagePool):
    """See above. ``bits``: of each tier, the first tier first. ``num_pages`` and ``capacity`` count
    pages of the first tier, ``lowered`` the moves to a lower tier. Slab 0 is reserved: a page
    passes through it when it moves within its own slab.

    ``lowest`` returns the lowest tier allowed for each page that a request holds, coldest first.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool,
        limit: int | None,
        bits: Sequence[int],
        lowest: Callable[[], Mapping[int, int]],
        eviction: Literal["lru", "cost"] = "lru",
    ) -> None:
        self._last_tier = len(bits) - 1
        self._units = 1 << self._last_tier  # parts of a slab
        count = ((num_pages - 1) << self._last_tier) + 1
        super().__init__(count, page_size, enable_prefix_caching, eviction=eviction)
        limit = num_pages if limit is None else limit
        self.capacity = limit - 1
        self.bits = tuple(bits)
        self.lowered = 0
        self._lowest_tiers = lowest
        self._slabs = BuddyAllocator(range(1, limit), len(bits))
        self._num_slabs = num_pages
        self._withheld_slabs = list(range(num_pages - 1, limit - 1, -1))
        self._locations = [0] * self.num_pages  # by page
        self._pages: dict[int, int] = {}  # by location
        self._counts = [0] * len(bits)  # of those, by tier
        self._lowered: set[int] = set()  # pages of requests that moved to a lower tier

    # Counts

    @property
    def num_free(self) -> int:
        return len(self._slabs.free[0])

    @property
    def num_available(self) -> int:
        """Pages a new owner could get now, with all pages in their lowest tier and none cached."""
        return self._obtainable_slabs((), self._lowest_tiers(), 0)

    @property
    def num_withheld(self) -> int:
        return len(self._withheld_slabs)

    def tier(self, page: int) -> int:
        """The tier of a page; 0 is the first."""
        return page_tier(self._locations[page])[0]

    def lowest_tier(self, min_bits: int | None) -> int:
        """The lowest tier with at least ``min_bits`` bits; the lowest of all for ``None``."""
        return sum(bits >= (min_bits or 0) for bits in self.bits) - 1

    def leading_pages(self, pages: Sequence[int], lowest_tier: int) -> list[int]:
        """The leading ``pages`` that are not below a tier."""
        coarse = (i for i, page in enumerate(pages) if self.tier(page) > lowest_tier)
        return list(pages[: next(coarse, len(pages))])

    def metrics(self, swapped: Sequence[int]) -> dict[str, float]:
        """The moves to a lower tier, and the number of used or cached pages by bits; also of the
        ``swapped`` pages, which are given by tier.
        """
        found: dict[str, float] = {"num_pages_lowered": self.lowered}
        for name, counts in (("num_pages", self._counts), ("swap_pages", swapped)):
            found |= {f"{name}_{bits}bit": n for bits, n in zip(self.bits, counts, strict=True)}
        return found

    # Owners

    def acquire(
        self, hits: Sequence[int], num_new: int, *, spare: int = 0, tiers: Sequence[int] = ()
    ) -> list[int] | None:
        """See :meth:`PagePool.acquire`; moves pages to lower tiers to make room."""
        requested = [*tiers, *[0] * (num_new - len(tiers))]
        counts = [requested.count(tier) for tier in range(self._last_tier + 1)]
        units = sum(self._units >> tier for tier in requested)
        slabs = -(-units // self._units)
        if self.on_shortage is not None and not self._slabs.fits(counts):
            self.on_shortage(slabs - self.num_free, False)
        short = slabs + spare > self.num_free
        lowest = self._lowest_tiers() if short else {}
        missing = spare - self._obtainable_slabs(hits, lowest, units) if short else 0
        if missing > 0 and self.on_shortage is not None:
            self.on_shortage(missing, True)
            missing = spare - self._obtainable_slabs(hits, lowest, units)
        if missing > 0:
            return None
        for page in hits:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1
        if self._costs is not None:
            self._costs.used(hits)
        if not self._slabs.fits(counts):
            self._make_room(counts, set(hits), lowest)
        new = []
        for tier in requested:
            page = self._free.pop()
            self._put(page, page_id(tier, self._slabs.allocate(tier)))
            self._references[page] = 1
            new.append(page)
        return [*hits, *new]

    def can_spare(self, count: int) -> bool:
        """See :meth:`PagePool.can_spare`: no page has to move to a lower tier for them."""
        return count <= self.num_free

    def withhold(self, count: int) -> list[int]:
        """See :meth:`PagePool.withhold`: whole slabs, evicting cached pages if necessary."""
        taken: list[int] = []
        while len(taken) < count:
            slab = self._slabs.take(0)
            if slab is not None:
                taken.append(slab)
            elif self._cached:
                self._vacate(self._evict())
            else:
                break
        self._withheld_slabs += taken
        self.capacity -= len(taken)
        return taken

    def grant(self, count: int) -> int:
        """See :meth:`PagePool.grant`."""
        kept = max(len(self._withheld_slabs) - count, 0)
        granted = self._withheld_slabs[kept:]
        del self._withheld_slabs[kept:]
        for slab in granted:
            self._slabs.release(0, slab)
        self.capacity += len(granted)
        return len(granted)

    def drop_cached(self) -> list[int]:
        """See :meth:`PagePool.drop_cached`; returns all free slabs."""
        while self._cached:
            self._vacate(self._evict())
        return list(self._slabs.free[0])

    def publish(self, page: int, key: PageKey) -> None:
        """See :meth:`PagePool.publish`; of two pages with equal keys the higher tier is known."""
        known = self._known.get(key.digest)
        if known is not None and self.tier(known) > self.tier(page):
            self.forget([known])
        super().publish(page, key)

    def _vacate(self, page: int) -> None:
        super()._vacate(page)
        self._lowered.discard(page)
        self._slabs.release(*self._leave(page))

    def _vacate_cached(self) -> None:
        while self._cached:
            self._vacate(self._cached.popitem()[0])

    # Making room

    def _obtainable_slabs(self, hits: Sequence[int], lowest: Mapping[int, int], units: int) -> int:
        """Whole slabs that could be freed after ``units`` more are taken, while ``hits`` and all
        pages in use stay; negative if the units are not available.
        """
        held = {page for page, count in enumerate(self._references) if count}
        held.update(hits)
        staying = set(hits)
        for page in held:
            tier = self.tier(page)
            if page not in staying:
                tier = max(tier, lowest.get(page, 0))
            units += self._units >> tier
        return self.capacity - -(-units // self._units)

    def _make_room(
        self, counts: Sequence[int], staying: set[int], lowest: Mapping[int, int]
    ) -> None:
        """Free ``counts`` blocks of the tiers. They are known to be obtainable."""
        limits = {**dict.fromkeys(self._cached, self._last_tier), **lowest}
        queues: list[deque[int]] = [deque() for _ in range(self._last_tier)]
        for page, limit in limits.items():
            if page not in staying and (tier := self.tier(page)) < limit:
                queues[tier].append(page)
        while not self._slabs.fits(counts):
            if self._compact():
                continue
            queue = next((queue for queue in queues if queue), None)
            if queue is None:
                self._vacate(self._evict())
                continue
            page = queue.popleft()
            self._lower(page)
            if self.tier(page) < limits[page]:
                queues[self.tier(page)].append(page)

    def _lower(self, page: int) -> None:
        """Move a page one tier down: into a free block, else into the first half of its own."""
        tier, index = page_tier(self._locations[page])
        free = self._slabs.take(tier + 1)
        if free is None:
            self._move(page, page_id(tier + 1, 0))  # by way of slab 0
            self._move(page, page_id(tier + 1, 2 * index))
            self._slabs.release(tier + 1, 2 * index + 1)
        else:
            self._move(page, page_id(tier + 1, free))
            self._slabs.release(tier, index)
        self.lowered += 1
        if self._references[page]:
            self._lowered.add(page)

    def _compact(self) -> bool:
        """Free a larger block: move the neighbour of one free block into another free block.

        False: no tier has two free blocks.
        """
        for tier in range(self._last_tier, 0, -1):
            free = self._slabs.free[tier]
            if len(free) >= 2:
                (first, _), (second, _) = free.popitem(), free.popitem()
                self._relocate(tier, first ^ 1, second)
                free[first] = None
                self._slabs.release(tier, first ^ 1)
                return True
        return False

    def _relocate(self, tier: int, source: int, target: int) -> None:
        """Move everything in one block, pages and free parts, to the same parts of another."""
        for lower in range(tier, self._last_tier + 1):
            parts = 1 << lower - tier
            for part in range(parts):
                old, new = source * parts + part, target * parts + part
                page = self._pages.get(page_id(lower, old))
                if page is not None:
                    self._move(page, page_id(lower, new))
                elif old in self._slabs.free[lower]:
                    del self._slabs.free[lower][old]
                    self._slabs.free[lower][new] = None

    def _move(self, page: int, location: int) -> None:
        self.copies.append(Move(self._locations[page], location))
        self.unconfirmed.add(page)
        self._leave(page)
        self._put(page, location)

    def _put(self, page: int, location: int) -> None:
        self._locations[page] = location
        self._pages[location] = page
        self._counts[page_tier(location)[0]] += 1

    def _leave(self, page: int) -> tuple[int, int]:
        location = self._locations[page]
        tier, index = page_tier(location)
        del self._pages[location]
        self._counts[tier] -= 1
        return tier, index

    # Plans

    def location(self, page: int) -> int:
        """See :meth:`PagePool.location`."""
        return self._locations[page]

    def with_locations(self, plan: StepPlan) -> StepPlan:
        """The plan with the locations of its pages instead of their ids."""
        return plan._replace(
            started=tuple(
                start._replace(pages=tuple(self.locations(start.pages))) for start in plan.started
            ),
            new_pages=tuple((name, tuple(self.locations(pages))) for name, pages in plan.new_pages),
        )

    def take_recoded(self) -> dict[int, int]:
        """Pages of requests that moved to a lower tier since the last call, and their bits now."""
        lowered, self._lowered = self._lowered, set()
        return {page: self.bits[self.tier(page)] for page in lowered}

    def _check_capacity(self) -> None:
        withheld = len(self._withheld_slabs)
        assert self.capacity + withheld == self._num_slabs - 1, "capacity is wrong"

    def check(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """See :meth:`PagePool.check`; also that each part of memory is free or has one page."""
        super().check(held)
        used = {page for page in range(1, self.num_pages) if page not in set(self._free)}
        assert used == set(self._pages.values()), "a page has no location, or more than one"
        assert all(self._locations[page] == location for location, page in self._pages.items())
        taken = [page_tier(location) for location in self._pages]
        taken += [(0, slab) for slab in self._withheld_slabs]
        self._slabs.check(taken, range(1, self._num_slabs))


def check_min_bits(request: Request, config: SchedulerConfig) -> None:
    """:raises RequestError: no page has as many bits as the request asks for."""
    least, most = request.params.kv_min_bits, config.kv_bits[0]
    if least is not None and least > most:
        raise RequestError(f"kv_min_bits={least}: the KV cache has {most} bits ({config.kv_type})")


def lowest_tiers(
    running: Sequence[Request], pool: TieredPagePool, keep: tuple[int, int]
) -> dict[int, int]:
    """The lowest tier allowed for each page of the running requests, last request first.

    ``keep``: how many pages at a request's beginning, and full ones at its end, stay as they are.
    """
    first, last = keep
    lowest: dict[int, int] = {}
    for request in reversed(running):
        lowest_tier = pool.lowest_tier(request.params.kv_min_bits)
        for sequence in request.sequences:
            full = sequence.num_computed // pool.page_size
            for index, page in enumerate(sequence.pages):
                limit = lowest_tier if first <= index < full - last else 0
                lowest[page] = min(lowest.get(page, limit), limit)
    return lowest


def moves_to_lowest_tier(
    pages: Sequence[int], num_computed: int, spec: KVSpec, keep: tuple[int, int]
) -> list[Move]:
    """Moves that take a request's pages to the lowest tier: all full pages except those to ``keep``
    at the beginning and at the end. Each location must be in a slab that holds nothing else.
    """
    moves: list[Move] = []
    num_tiers, (first, last) = len(spec.tiers), keep
    full = num_computed // spec.page_size if num_tiers > 1 else 0
    for location in pages[first : max(full - last, 0)]:
        for tier in range(page_tier(location)[0] + 1, num_tiers):
            passing, below = page_id(tier, 0), page_id(tier, 2 * page_tier(location)[1])
            moves += [Move(location, passing), Move(passing, below)]
            location = below
    return moves
