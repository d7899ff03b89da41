"""The pages of the KV cache: their owners, what is in them, and which may be evicted.

A page is the KV of ``page_size`` consecutive tokens of one request, in every layer. It is in
exactly one of three states: **used** (reference count > 0), **cached** (no owner, but its content
is known and a later request may use it) or **free**. ``free + cached + used == capacity`` at all
times. **Withheld** pages do not count: they have no memory until they are granted again, because
the cache was made smaller or its memory is lent to another model.

*Prefix cache.* A full page is identified by the digest of everything that determines its content:
the tokens before it and in it, the adapter, the KV type and the caller's salt::

    root   = sha256(adapter, KV type, salt)
    key_0  = sha256(root,         tokens of page 0)
    key_i  = sha256(digest_{i-1}, tokens of page i)

On a hit the parent digest and the tokens are compared too, so that a collision is a miss and never
another request's text. A page becomes known (``publish``) only after the step that wrote it was
committed, and it is never written again while known: requests that share it may read it at any
time.

*Eviction.* Least recently used first, or what costs least to compute again (``cost_eviction.py``).
The pages of one request are given back tail first, so that a prefix loses its end before its
beginning (a page whose predecessor is gone can never be hit again).

*Page 0* is reserved for padding in page tables and batches. No request owns it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import Literal, NamedTuple

from sdk.engine.pages.cost_eviction import CostOrder
from sdk.engine.plan import Copy


class PageKey(NamedTuple):
    """The identity of a page: its digest, its predecessor's digest, and its tokens.

    With fewer tokens than a page has it is the identity of a tail (:class:`Tails`).
    """

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


def root_digest(adapter: str | None, kv_type: str, salt: str | None) -> bytes:
    """The parent of a request's first page: requests with different roots never share a page."""
    return sha256(repr((adapter, kv_type, salt)).encode("utf-8", "surrogatepass")).digest()


def page_digest(parent: bytes, tokens: bytes) -> bytes:
    """The digest of the page with these tokens, 8 bytes each, that follows the page ``parent``."""
    return sha256(parent + tokens).digest()


def page_key(parent: bytes, token_ids: Sequence[int]) -> PageKey:
    """The key of the page with these tokens that follows the page ``parent``."""
    return PageKey(page_digest(parent, array("q", token_ids).tobytes()), parent, tuple(token_ids))


class PagePool:
    """Hands out the pages ``1 .. num_pages - 1`` and remembers what full pages hold.

    The pages from ``limit`` on are withheld at first. Not thread-safe. ``queries`` and ``hits``
    count whole pages looked up and found by admitted requests, ``evictions`` cached pages that lost
    their content to a new owner.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = True,
        *,
        limit: int | None = None,
        eviction: Literal["lru", "cost"] = "lru",
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is reserved), got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        limit = num_pages if limit is None else limit
        self.capacity = limit - 1
        self.queries = 0
        self.hits = 0
        self.evictions = 0
        #: Copies that the next plan will make, in the order in which they were decided.
        self.copies: list[Copy] = []
        #: Pages whose content is the target of a copy that may not have been made yet: one of
        #: ``copies`` or of the last plan.
        self.unconfirmed: set[int] = set()
        #: Bytes of a page, where memory moves between pages and other places (budget.py).
        self.unit_bytes = 0
        #: Called with the number of pages that must be free or only cached, if there are too few
        #: free ones. It may ``give`` pages.
        self.on_need: Callable[[int], None] | None = None
        #: Called with the number of pages that were granted (negative: withheld) from outside.
        self.on_resize: Callable[[int], None] | None = None
        #: Called when a page is not known any more; ``None``: no page is.
        self.on_forget: Callable[[int | None], None] | None = None
        #: Called with a cached page, which may be a tail, and its key before it is evicted.
        self.on_evict: Callable[[int, PageKey], None] | None = None
        #: Called when a page becomes known (True) or unknown (False); ``None``: all became unknown.
        self.on_known: Callable[[PageKey | None, bool], None] | None = None
        self._references = [0] * num_pages
        self._keys: list[PageKey | None] = [None] * num_pages
        #: Called with a number of missing pages, before cached ones are evicted, and once more
        #: (``urgent``) before :meth:`acquire` returns None. It may ``grant`` pages.
        self.on_shortage: Callable[[int, bool], None] | None = None
        self._withheld = list(range(num_pages - 1, limit - 1, -1))
        self._free = list(range(limit - 1, 0, -1))  # a stack: last in, first out
        self._costs = CostOrder(num_pages, page_size) if eviction == "cost" else None
        # the pages to evict, first to last; of an OrderedDict: least recently used first
        self._cached: OrderedDict[int, None] | CostOrder = (
            OrderedDict() if self._costs is None else self._costs
        )
        self._known: dict[bytes, int] = {}  # digest -> page

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages without an owner whose content is known."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages a new owner could get now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_withheld(self) -> int:
        """Pages without memory."""
        return len(self._withheld)

    def key(self, page: int) -> PageKey | None:
        """The key of a known page; ``None`` for any other."""
        return self._keys[page]

    @property
    def digests(self) -> list[bytes]:
        """The digests of all known pages that are full."""
        keys, size = self._keys, self.page_size
        known = (keys[page] for page in self._known.values())
        return [key.digest for key in known if key is not None and len(key.token_ids) == size]

    def location(self, page: int) -> int:
        """The kernels' id of a page, once all copies noted so far are made."""
        return page

    def locations(self, pages: Sequence[int]) -> list[int]:
        """See :meth:`location`."""
        return [self.location(page) for page in pages]

    def take_copies(self) -> tuple[Copy, ...]:
        """The copies noted since the last call, for the plan that is about to run."""
        copies = tuple(self.copies)
        self.copies.clear()  # the swap space appends to the same list
        return copies

    def confirm_copies(self) -> None:
        """The last plan was carried out, so its copies were made."""
        self.unconfirmed.clear()

    def match(self, keys: Sequence[PageKey]) -> list[int]:
        """The known pages of the longest prefix of ``keys``. Changes nothing."""
        pages = []
        for key in keys:
            page = self._known.get(key.digest)
            if page is None or self._keys[page] != key:
                break
            pages.append(page)
        return pages

    def count_idle(self, hits: Sequence[int]) -> int:
        """How many of these known pages have no owner."""
        return sum(not self._references[page] for page in set(hits))

    def acquire(
        self, hits: Sequence[int], num_new: int, *, spare: int = 0, tiers: Sequence[int] = ()
    ) -> list[int] | None:
        """Take ``hits`` (from ``match``, just now), which are shared, and ``num_new`` new pages.

        All or nothing: returns ``None`` and changes nothing if fewer than ``spare`` pages would
        stay available. ``tiers``: tiers of the first new pages; the others are in the first tier.
        """
        references, cached = self._references, self._cached
        num_idle = sum(references[page] == 0 for page in hits)
        if num_new > len(self._free) and self.on_need is not None:
            self.on_need(num_new + num_idle + spare)
        if num_new > len(self._free) and self.on_shortage is not None:
            self.on_shortage(num_new - len(self._free), False)
        short = num_new + num_idle + spare - len(self._free) - len(cached)
        if short > 0 and self.on_shortage is not None:
            self.on_shortage(short, True)
            short = num_new + num_idle + spare - len(self._free) - len(cached)
        if short > 0:
            return None
        if self._costs is not None:
            self._costs.used(hits)
        for page in hits:  # before any eviction, which must not take them
            if references[page] == 0:
                del cached[page]
            references[page] += 1
        pages = list(hits)
        for _ in range(num_new):
            page = self._free.pop() if self._free else self._evict()
            references[page] = 1
            pages.append(page)
        return pages

    def can_spare(self, count: int) -> bool:
        """Whether this many pages are free or only cached: no request is worse off without them."""
        return count <= len(self._free) + len(self._cached)

    def withhold(self, count: int) -> list[int]:
        """Withhold up to ``count`` pages without an owner, free ones first; returns them. With
        groups the budget shrinks by as much."""
        taken = self.take_away(count)
        if self.on_resize is not None:
            self.on_resize(-len(taken))
        return taken

    def take_away(self, count: int) -> list[int]:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        taken = self._free[:count]
        del self._free[:count]
        while len(taken) < count and self._cached:
            taken.append(self._evict())
        self._withheld += taken
        self.capacity -= len(taken)
        return taken

    def grant(self, count: int) -> int:
        """Give back up to ``count`` withheld pages; returns how many. With groups the budget grows
        by as much."""
        granted = self.give(count)
        if self.on_resize is not None:
            self.on_resize(len(granted))
        return len(granted)

    def give(self, count: int) -> list[int]:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        kept = max(len(self._withheld) - count, 0)
        granted = self._withheld[kept:]
        del self._withheld[kept:]
        self._free += granted
        self.capacity += len(granted)
        return granted

    # Memory that moves (budget.Places)

    @property
    def num_spare(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return len(self._free) + len(self._cached)

    @property
    def num_unused(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return len(self._free)

    def drop_cached(self) -> list[int]:
        """Evict all cached pages; returns all free pages."""
        while self._cached:
            self._free.append(self._evict())
        return list(self._free)

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        key = self._keys[page]
        if self.on_evict is not None and key is not None:
            self.on_evict(page, key)
        self._forget(page)
        self.evictions += 1
        return page

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            self._keys[page] = None
            del self._known[key.digest]
            if self.on_forget is not None:
                self.on_forget(page)
            if self.on_known is not None:
                self.on_known(key, False)
            if self._costs is not None:
                self._costs.forget(page)

    def release(self, pages: Sequence[int]) -> None:
        """Give back one reference to each page; a request's whole table at once, head first."""
        if self._costs is not None:
            self._costs.released(pages)
        for page in reversed(pages):  # tail first into the LRU order: the tail is evicted first
            count = self._references[page]
            if count == 0:
                raise ValueError(f"page {page} is released but has no owner")
            self._references[page] = count - 1
            if count == 1:
                if self._keys[page] is None:
                    self._vacate(page)
                else:
                    self._cached[page] = None

    def _vacate(self, page: int) -> None:
        """The page has no content and no owner any more."""
        if self._costs is not None:
            self._costs.forget(page)  # also what a page that was never known was given
        self._free.append(page)

    def publish(self, page: int, key: PageKey) -> None:
        """Make a full page known, now that a committed step has written it.

        If another page already has the same content (two requests computed it at the same time),
        that one stays known and this page remains private.
        """
        if not self._references[page]:
            raise ValueError(f"page {page} is published but has no owner")
        if not self.enable_prefix_caching or self._keys[page] is not None:
            return
        if self._known.setdefault(key.digest, page) == page:
            self._keys[page] = key
            if self.on_known is not None:
                self.on_known(key, True)

    def forget(self, pages: Iterable[int]) -> None:
        """Make these pages unknown, because their content may be wrong. Owners keep them."""
        for page in pages:
            self._forget(page)
            if page in self._cached:
                del self._cached[page]
                self._vacate(page)

    def reset_prefix_cache(self) -> None:
        """Make all pages unknown. Pages in use stay with their owners.

        It runs in the caller's thread, where a signal handler may raise in any function call: then
        pages are cached but unknown, and evicted later.
        """
        self._keys = [None] * self.num_pages
        self._known.clear()
        if self.on_forget is not None:
            self.on_forget(None)
        if self.on_known is not None:
            self.on_known(None, False)
        if self._costs is not None:
            for page in range(self.num_pages):
                self._costs.forget(page)
        self._vacate_cached()

    def _vacate_cached(self) -> None:
        self._free.extend(self._cached)
        self._cached.clear()

    def _check_capacity(self) -> None:
        assert self.capacity + len(self._withheld) == self.num_pages - 1, "capacity is wrong"

    def check(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """Assert that all counts agree. ``held``: the page tables of all owners, if given."""
        free, cached = set(self._free), set(self._cached)
        used = {page for page, count in enumerate(self._references) if count}
        assert all(count >= 0 for count in self._references), "a negative reference count"
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & cached or free & used or cached & used), "a page is in two states"
        assert 0 not in free | cached | used, "the reserved page 0 was handed out"
        withheld = set(self._withheld)
        assert not withheld & (free | cached | used), "a withheld page was handed out"
        total = len(free) + len(cached) + len(used) + len(withheld)
        assert total == self.num_pages - 1, "a page was lost"
        self._check_capacity()
        known = {page: key for page, key in enumerate(self._keys) if key is not None}
        assert not free & known.keys(), "a free page is known"
        assert cached <= known.keys(), "a cached page is not known"
        assert self._known == {key.digest: page for page, key in known.items()}, "digests differ"
        if held is not None:
            counts = [0] * self.num_pages
            for pages in held:
                assert len(set(pages)) == len(pages), "a page is twice in one table"
                for page in pages:
                    counts[page] += 1
            assert counts == self._references, "reference counts and page tables differ"
