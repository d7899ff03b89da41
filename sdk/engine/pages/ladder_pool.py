"""A pool whose pages go down a ladder of types before anybody loses one: ``float16>int8>int4``.

A page of each type takes half the room of one of the type above, so that the memory is cut into
*slabs* (``slabs.py``), each room for one page of the first type, two halves or four quarters. A
page keeps its id for as long as somebody holds it or its content is cached; its *place*, which is
what the kernels know it by and says its type, changes. New pages are of the first type, and only
those are written; what comes back from the swap space does so in the type in which it went there.

*Making room.* Lossless first: two slabs that are half empty become a full and an empty one. Then
the coldest page of the first type goes down one step, then the next, until none is left that may;
then those of the second type. Only then is the content of cached pages given up, as in any pool,
and after that requests are preempted. Coldest are the cached pages, least recently used first, then
those of the request that would be preempted first. A request's first page, where trained models
leave much of their attention, and pages not yet full stay as they are (``kv_keep``: more of them at
both ends), and so do those of a request whose ``kv_min_bits`` says so. A page that went down does
not come up again.

*It always ends.* No page takes more than a slab, whatever became of it, so the first request in
order still gets all the pages it may need when everybody else has gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from sdk.engine.pages.page_pool import PageKey, PagePool
from sdk.engine.pages.slabs import Slabs
from sdk.engine.plan import Move, StepPlan
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.errors import RequestError
from sdk.kernels.ladder import page_id, page_level
from sdk.quant.spec import KVSpec


class LadderPool(PagePool):
    """See above. ``bits``: of each type, the first first. ``num_pages`` and ``capacity`` count
    pages of the first type; ``lowered`` how often a page went down. Slab 0 belongs to nobody; its
    parts serve as the place of a page on its way within its own slab.

    ``lowest`` is to say how far down the pages that requests hold may be, coldest first.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool,
        limit: int | None,
        bits: Sequence[int],
        lowest: Callable[[], Mapping[int, int]],
    ) -> None:
        self._deepest = len(bits) - 1
        self._units = 1 << self._deepest  # parts of a slab
        super().__init__(((num_pages - 1) << self._deepest) + 1, page_size, enable_prefix_caching)
        limit = num_pages if limit is None else limit
        self.capacity = limit - 1
        self.bits = tuple(bits)
        self.lowered = 0
        self._lowest = lowest
        self._slabs = Slabs(range(1, limit), len(bits))
        self._num_slabs = num_pages
        self._withheld_slabs = list(range(num_pages - 1, limit - 1, -1))
        self._places = [0] * self.num_pages  # by page
        self._pages: dict[int, int] = {}  # by place
        self._counts = [0] * len(bits)  # of those, by level
        self._lowered: set[int] = set()  # pages of requests that went down

    # What there is

    @property
    def num_free(self) -> int:
        return len(self._slabs.free[0])

    @property
    def num_available(self) -> int:
        """Pages a new owner could get now, if all that may went down and nothing stayed cached."""
        return self._obtainable((), self._lowest(), 0)

    @property
    def num_withheld(self) -> int:
        return len(self._withheld_slabs)

    def level(self, page: int) -> int:
        """The type a page is of, 0 being the first."""
        return page_level(self._places[page])[0]

    def deepest(self, min_bits: int | None) -> int:
        """The last level of at least so many bits; all levels for ``None``."""
        return sum(bits >= (min_bits or 0) for bits in self.bits) - 1

    def precise(self, pages: Sequence[int], deepest: int) -> list[int]:
        """As many of the first ``pages`` as are not below this level."""
        coarse = (i for i, page in enumerate(pages) if self.level(page) > deepest)
        return list(pages[: next(coarse, len(pages))])

    def metrics(self, swapped: Sequence[int]) -> dict[str, float]:
        """How often a page went down, and those used or cached by the bits of their type; also of
        those in the swap space, which are given by level.
        """
        found: dict[str, float] = {"num_pages_lowered": self.lowered}
        for name, counts in (("num_pages", self._counts), ("swap_pages", swapped)):
            found |= {f"{name}_{bits}bit": n for bits, n in zip(self.bits, counts, strict=True)}
        return found

    # Owners

    def acquire(
        self, hits: Sequence[int], num_new: int, *, spare: int = 0, levels: Sequence[int] = ()
    ) -> list[int] | None:
        """See :meth:`PagePool.acquire`; what must go down for it goes down."""
        wanted = [*levels, *[0] * (num_new - len(levels))]
        counts = [wanted.count(level) for level in range(self._deepest + 1)]
        units = sum(self._units >> level for level in wanted)
        slabs = -(-units // self._units)
        if self.lender is not None and not self._slabs.fits(counts):
            self.lender(slabs - self.num_free, False)
        short = slabs + spare > self.num_free
        lowest = self._lowest() if short else {}
        missing = spare - self._obtainable(hits, lowest, units) if short else 0
        if missing > 0 and self.lender is not None:
            self.lender(missing, True)
            missing = spare - self._obtainable(hits, lowest, units)
        if missing > 0:
            return None
        for page in hits:
            if self._references[page] == 0:
                del self._cached[page]
            self._references[page] += 1
        if not self._slabs.fits(counts):
            self._make_room(counts, set(hits), lowest)
        new = []
        for level in wanted:
            page = self._free.pop()
            self._put(page, page_id(level, self._slabs.cut(level)))
            self._references[page] = 1
            new.append(page)
        return [*hits, *new]

    def withhold(self, count: int) -> list[int]:
        """See :meth:`PagePool.withhold`: slabs that are free, or are when cached pages go."""
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
            self._slabs.give(0, slab)
        self.capacity += len(granted)
        return len(granted)

    def drop_cached(self) -> list[int]:
        """See :meth:`PagePool.drop_cached`; all free slabs."""
        while self._cached:
            self._vacate(self._evict())
        return list(self._slabs.free[0])

    def publish(self, page: int, key: PageKey) -> None:
        """See :meth:`PagePool.publish`; of two pages with the same in them the better is known."""
        known = self._known.get(key.digest)
        if known is not None and self.level(known) > self.level(page):
            self.forget([known])
        super().publish(page, key)

    def _vacate(self, page: int) -> None:
        super()._vacate(page)
        self._lowered.discard(page)
        self._slabs.give(*self._leave(page))

    # Making room

    def _obtainable(self, hits: Sequence[int], lowest: Mapping[int, int], units: int) -> int:
        """Whole slabs that could be free while ``hits`` and all pages in use stay and so many units
        are taken; below 0 where those are not to be had.
        """
        held = {page for page, count in enumerate(self._references) if count}
        held.update(hits)
        staying = set(hits)
        for page in held:
            level = self.level(page)
            if page not in staying:
                level = max(level, lowest.get(page, 0))
            units += self._units >> level
        return self.capacity - -(-units // self._units)

    def _make_room(
        self, counts: Sequence[int], staying: set[int], lowest: Mapping[int, int]
    ) -> None:
        """Have so many free places of each level, which are known to be obtainable."""
        limits = {**dict.fromkeys(self._cached, self._deepest), **lowest}
        queues: list[deque[int]] = [deque() for _ in range(self._deepest)]
        for page, limit in limits.items():
            if page not in staying and (level := self.level(page)) < limit:
                queues[level].append(page)
        while not self._slabs.fits(counts):
            if self._gather():
                continue
            queue = next((queue for queue in queues if queue), None)
            if queue is None:
                self._vacate(self._evict())
                continue
            page = queue.popleft()
            self._lower(page)
            if self.level(page) < limits[page]:
                queues[self.level(page)].append(page)

    def _lower(self, page: int) -> None:
        """One step down: into a free place of that size, else into the first half of its own."""
        level, index = page_level(self._places[page])
        free = self._slabs.take(level + 1)
        if free is None:
            self._move(page, page_id(level + 1, 0))  # in slab 0
            self._move(page, page_id(level + 1, 2 * index))
            self._slabs.give(level + 1, 2 * index + 1)
        else:
            self._move(page, page_id(level + 1, free))
            self._slabs.give(level, index)
        self.lowered += 1
        if self._references[page]:
            self._lowered.add(page)

    def _gather(self) -> bool:
        """Make one larger place of two free ones, by what lies beside the first. False: no two."""
        for level in range(self._deepest, 0, -1):
            free = self._slabs.free[level]
            if len(free) >= 2:
                (first, _), (second, _) = free.popitem(), free.popitem()
                self._relocate(level, first ^ 1, second)
                free[first] = None
                self._slabs.give(level, first ^ 1)
                return True
        return False

    def _relocate(self, level: int, source: int, target: int) -> None:
        """Everything within a place, pages and free parts, goes to the same part of another."""
        for deeper in range(level, self._deepest + 1):
            parts = 1 << deeper - level
            for part in range(parts):
                old, new = source * parts + part, target * parts + part
                page = self._pages.get(page_id(deeper, old))
                if page is not None:
                    self._move(page, page_id(deeper, new))
                elif old in self._slabs.free[deeper]:
                    del self._slabs.free[deeper][old]
                    self._slabs.free[deeper][new] = None

    def _move(self, page: int, place: int) -> None:
        self.copies.append(Move(self._places[page], place))
        self.unsettled.add(page)
        self._leave(page)
        self._put(page, place)

    def _put(self, page: int, place: int) -> None:
        self._places[page] = place
        self._pages[place] = page
        self._counts[page_level(place)[0]] += 1

    def _leave(self, page: int) -> tuple[int, int]:
        place = self._places[page]
        level, index = page_level(place)
        del self._pages[place]
        self._counts[level] -= 1
        return level, index

    # Plans

    def place(self, page: int) -> int:
        """See :meth:`PagePool.place`."""
        return self._places[page]

    def placed(self, plan: StepPlan) -> StepPlan:
        """The plan in the places of its pages."""
        return plan._replace(
            started=tuple(
                replace(start, pages=tuple(self.places(start.pages))) for start in plan.started
            ),
            new_pages=tuple((name, tuple(self.places(pages))) for name, pages in plan.new_pages),
        )

    def take_lowered(self) -> dict[int, int]:
        """Pages of requests that went down since the last time, and the bits they have now."""
        lowered, self._lowered = self._lowered, set()
        return {page: self.bits[self.level(page)] for page in lowered}

    def _check_capacity(self) -> None:
        withheld = len(self._withheld_slabs)
        assert self.capacity + withheld == self._num_slabs - 1, "capacity is wrong"

    def check(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """See :meth:`PagePool.check`; and every place is free or a page's, once."""
        super().check(held)
        used = {page for page in range(1, self.num_pages) if page not in set(self._free)}
        assert used == set(self._pages.values()), "a page has no place, or one too many"
        assert all(self._places[page] == place for place, page in self._pages.items())
        taken = [page_level(place) for place in self._pages]
        taken += [(0, slab) for slab in self._withheld_slabs]
        self._slabs.check(taken, range(1, self._num_slabs))


def check_floor(request: Request, config: SchedulerConfig) -> None:
    """:raises RequestError: pages are never of as many bits as it asks for."""
    wanted, most = request.params.kv_min_bits, config.kv_bits[0]
    if wanted is not None and wanted > most:
        raise RequestError(f"kv_min_bits={wanted}: the KV cache has {most} bits ({config.kv_type})")


def held_pages(
    running: Sequence[Request], pool: LadderPool, keep: tuple[int, int]
) -> dict[int, int]:
    """How far down the pages of running requests may be; those of the last in order first.

    ``keep``: of each, the pages at its beginning and full ones at its end that stay.
    """
    first, last = keep
    lowest: dict[int, int] = {}
    for request in reversed(running):
        deepest = pool.deepest(request.params.kv_min_bits)
        for sequence in request.sequences:
            full = sequence.num_computed // pool.page_size
            for index, page in enumerate(sequence.pages):
                limit = deepest if first <= index < full - last else 0
                lowest[page] = min(lowest.get(page, limit), limit)
    return lowest


def descent(
    pages: Sequence[int], num_computed: int, spec: KVSpec, keep: tuple[int, int]
) -> list[Move]:
    """What takes the pages of a request, places in slabs of their own, as far down as a pool could:
    all full ones but those to ``keep`` at the beginning and at the end.
    """
    moves: list[Move] = []
    num_levels, (first, last) = len(spec.levels), keep
    full = num_computed // spec.page_size if num_levels > 1 else 0
    for place in pages[first : max(full - last, 0)]:
        for level in range(page_level(place)[0] + 1, num_levels):
            passing, below = page_id(level, 0), page_id(level, 2 * page_level(place)[1])
            moves += [Move(place, passing), Move(passing, below)]
            place = below
    return moves
