"""The prefix cache: finds the pages that hold a prefix of a prompt before the prompt runs.

A prefix is looked up in the pages of the cache, then in the swap space (``swap.py``), then in the
pending pages, which a running request is about to write. Another request that needs those waits for
them instead of computing them again.

*Pins.* The pages of a pinned prefix have one owner in addition to the requests that use them, so
they are never evicted. No other request can have them: ``available_pages`` is what a request could
get if all others were gone. A request that needs more is rejected, and so is a pin that would leave
an accepted request less than it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from sdk.engine.pages.groups import Groups, Pinned
from sdk.engine.pages.page_pool import PageKey, PagePool, page_key, root_digest
from sdk.engine.pages.state_saves import StateSaves, mark
from sdk.engine.pages.swap import Holds, SwapSpace
from sdk.engine.pages.swapped_places import NO_HIT, Hit, SwappedPlaces
from sdk.engine.pages.tails import Tail, Tails
from sdk.engine.pages.tiered_pool import TieredPagePool
from sdk.engine.plan import Copy, Duplicate, Swap
from sdk.engine.scheduling.request import Request


class Prefix(NamedTuple):
    """The cached part of one sequence: pages of the cache, then pages of the swap space, then the
    first tokens of one more page, which is copied. ``hit``: with groups, what it needs besides.
    ``num_known``: its leading pages that are known, of which groups may serve fewer."""

    pages: list[int]
    swapped: list[PageKey]
    tail: Tail | None = None
    hit: Hit = NO_HIT
    num_known: int = 0

    @property
    def num_pages(self) -> int:
        return len(self.pages) + len(self.swapped)

    def num_tokens(self, page_size: int) -> int:
        """Tokens that need not be computed."""
        found = self.num_pages * page_size
        if self.hit.tail is not None:
            found += len(self.hit.tail.token_ids)
        return found + (0 if self.tail is None else self.tail.num_tokens)


class Prefixes:
    """Finds, shares, publishes and pins the pages of prefixes. Not thread-safe."""

    def __init__(
        self,
        pool: PagePool,
        kv_type: str,
        tiered: TieredPagePool | None = None,
        groups: Groups | None = None,
        num_swap_pages: int = 0,
        swap_parts: Sequence[int] = (1,),
    ) -> None:
        self.pool = pool
        #: ``None``: pages contain all that there is of their tokens.
        self.groups = groups
        #: Whether running requests have recurrent states.
        self.has_states = groups is not None and groups.states is not None
        self._tiered = tiered  # the pool, if it has tiers
        num_tiers = 1 if tiered is None else len(tiered.bits)
        self.swap = SwapSpace(num_swap_pages, pool.copies, num_tiers, swap_parts, pool.page_size)
        self.pending: dict[bytes, Request] = {}  # page digest -> the running request writing it
        self.tails = Tails(pool)
        self.restored = 0  # pages written from snapshots
        #: What is in the swap space besides pages.
        self._swapped: SwappedPlaces | None = None
        self._kv_type = kv_type
        self._pins: dict[bytes, tuple[int, ...]] = {}  # digest of the last page -> all of them
        self._pinned: set[int] = set()
        self._pinned_groups: dict[bytes, Pinned] = {}
        if groups is not None and groups.snapshots is not None:
            self.tails.most_kept = groups.snapshots.num_slots
        if num_swap_pages:
            pool.on_evict = self._swap_out
            if groups is not None:
                groups.use_swap(self.swap)
                self._swapped = groups.swapped

    def _swap_out(self, page: int, key: PageKey) -> None:
        """A cached page is about to be evicted. Tails are stored for the states after them."""
        if self.has_states or len(key.token_ids) == self.pool.page_size:
            self.swap.store(self.pool.location(page), key)
            if self._swapped is not None:
                self._swapped.store(page)

    def extend_keys(self, request: Request, num_pages: int) -> None:
        """Compute the keys of a request's first ``num_pages`` pages, all of them full."""
        request.extend_keys(self._root(request), self.pool.page_size, num_pages)

    def _root(self, request: Request) -> bytes:
        return root_digest(request.adapter, self._kv_type, request.job.cache_salt)

    def awaits(self, request: Request) -> bool:
        """Whether what a request waited for last time is still about to be cached."""
        waits_for, groups = request.waits_for, self.groups
        if waits_for in self.pending:
            return True
        return groups is not None and groups.saves is not None and waits_for in groups.saves.pending

    def find(self, request: Request, *, tails: bool = True) -> Prefix:
        """The cached pages that a request may use. Sets ``waits_for`` if another request is about
        to write the next one.

        At least the last token is always left to run, because a step without tokens samples none.
        """
        request.waits_for = None
        if not self.pool.enable_prefix_caching:
            return self._nothing()
        size, num_tokens = self.pool.page_size, request.num_tokens
        self.extend_keys(request, num_tokens // size)
        if not request.uses_prefix_cache:
            return self._nothing()
        if self.groups is not None:
            return self._find_in_groups(request, self.groups, tails)
        keys = request.keys[: (num_tokens - 1) // size]
        pages, lowest_tier = self.pool.match(keys), 0
        if self._tiered is not None:
            lowest_tier = self._tiered.lowest_tier(request.params.kv_min_bits)
            pages = self._tiered.leading_pages(pages, lowest_tier)
        rest = keys[len(pages) :]
        swapped = rest[: self.swap.match(rest, lowest_tier)]
        known = len(pages) + len(swapped)
        if known < len(keys) and keys[known].digest in self.pending:
            request.waits_for = keys[known].digest
        if request.waits_for is not None or swapped:
            return Prefix(pages, swapped)
        parent = keys[known - 1].digest if known else self._root(request)
        token_ids = request.key_ids(known * size, num_tokens - 1)
        tail = self.tails.find(parent, token_ids, known) if tails else None
        return Prefix(pages, swapped, tail)

    def _nothing(self, num_known: int = 0) -> Prefix:
        """No part of a sequence is cached."""
        if self.groups is None:
            return Prefix([], [])
        return Prefix([], [], None, self.groups.longest([]), num_known)

    def _find_in_groups(self, request: Request, groups: Groups, tails: bool) -> Prefix:
        """:meth:`find`: the longest boundary that all groups serve.

        If the prompt leaves what another request computes in the middle, that one takes a snapshot
        there.
        """
        size, num_tokens, saves = self.pool.page_size, request.num_tokens, groups.saves
        keys = request.keys[: (num_tokens - 1) // size]
        pages = self.pool.match(keys)
        known = len(pages) + self.swap.match(keys[len(pages) :])
        if known < len(keys) and (writer := self.pending.get(keys[known].digest)) is not None:
            request.waits_for = keys[known].digest
            if saves is not None:
                self._save_branch(saves, writer, keys, known)
            return self._nothing()
        index = known
        while index >= 0:
            if saves is not None and index:
                marked = mark(keys[index - 1].digest)
                if marked in saves.pending:
                    request.waits_for = marked
                    return self._nothing()
            some, swapped = pages[:index], keys[len(pages) : index]
            if tails and (found := self._tail_in_groups(request, groups, some, swapped)):
                return found._replace(num_known=known)
            snapshot, has_state = None, groups.states is None or not index
            state: PageKey | None = None
            if groups.snapshots is not None and index:
                if index <= len(pages):
                    snapshot = groups.snapshots.of(pages[index - 1])
                if snapshot is None and self._has_state(keys[index - 1]):
                    state = keys[index - 1]
                has_state = snapshot is not None or state is not None
            if has_state:
                missing = groups.serves(some, index * size, swapped)
                if missing < 0:
                    hit = groups.hit(some, index * size, snapshot, len(swapped), state)
                    return Prefix(some, swapped, None, hit, known)
                if groups.states is None:
                    index = missing + 1  # every boundary between sees the page without a frame
            index -= 1
        return self._nothing(known)

    def _save_branch(
        self, saves: StateSaves, writer: Request, keys: Sequence[PageKey], known: int
    ) -> None:
        """Let ``writer``, which computes the page after the ``known`` ones, take a snapshot where
        ``keys`` leave its tokens."""
        end = known + 1
        while end < len(keys) and self.pending.get(keys[end].digest) is writer:
            end += 1
        saves.save_at(writer, end)

    def ran(self, sequence: Request, num_tokens: int, drafts: bool) -> None:
        """A step has run ``num_tokens`` tokens of a sequence with a recurrent state, and what they
        filled was published."""
        state = sequence.state
        if self.groups is not None and state is not None and (drafts or state.awaits_step):
            assert self.groups.saves is not None
            self.groups.saves.ran(sequence, num_tokens, drafts)

    def need_save(self, sequences: Sequence[Request]) -> list[Request]:
        """Of sequences that decode again those whose states are saved in that step."""
        if self.groups is None or self.groups.saves is None:
            return []
        last = self.pool.page_size - 1
        return [one for one in sequences if one.num_computed % (last + 1) == last]

    def look_ahead(self, waiting: Iterable[Request]) -> None:
        """With states: requests that will start later may leave what running ones are about to
        compute. Those take a snapshot there while they are at it."""
        if self.groups is None or (saves := self.groups.saves) is None:
            return
        size = self.pool.page_size
        for request in waiting:
            for sequence in request.sequences:
                if not sequence.uses_prefix_cache or not self.pool.enable_prefix_caching:
                    continue
                self.extend_keys(sequence, sequence.num_tokens // size)
                keys = sequence.keys[: (sequence.num_tokens - 1) // size]
                known = len(self.pool.match(keys))
                writer = self.pending.get(keys[known].digest) if known < len(keys) else None
                if writer is not None:
                    self._save_branch(saves, writer, keys, known)

    def _has_state(self, key: PageKey) -> bool:
        """Whether the swap space has the state after a page or a tail."""
        return self._swapped is not None and self._swapped.has_state(key)

    def _tail_in_groups(
        self,
        request: Request,
        groups: Groups,
        pages: list[int],
        swapped: Sequence[PageKey],
    ) -> Prefix | None:
        """The longest prefix that ends with a tail after these pages, and that all groups serve;
        the tail is cached, or in the swap space."""
        size, index = self.pool.page_size, len(pages) + len(swapped)
        parent = request.keys[index - 1].digest if index else self._root(request)
        stored = self.swap.tails_after(parent)
        if not stored and not self.tails.any_after(parent):
            return None
        first = index * size
        token_ids = request.key_ids(first, min(first + size, request.num_tokens - 1))

        def may_use(tail: Tail) -> bool:
            if groups.snapshots is not None and (
                not tail.whole or groups.snapshots.of(tail.page) is None
            ):
                return False
            if groups.tail_frames(tail.page, tail.writer, index) is None:
                return False
            return groups.serves(pages, first + tail.num_tokens, swapped) < 0

        tail = self.tails.find(parent, token_ids, index, may_use)
        if tail is not None:
            snapshot = None if groups.snapshots is None else groups.snapshots.of(tail.page)
            hit = groups.hit(pages, first + tail.num_tokens, snapshot, len(swapped))
            return Prefix(pages, list(swapped), tail, hit)
        for key in stored:
            count = len(key.token_ids)
            if key.token_ids != tuple(token_ids[:count]) or not self._has_state(key):
                continue
            if groups.serves(pages, first + count, [*swapped, key]) < 0:
                hit = groups.hit(pages, first + count, None, len(swapped), key, key)
                return Prefix(pages, list(swapped), None, hit)
        return None

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a prompt that are cached, swapped out, or about to be cached.

        Changes nothing, not even the request's keys: another thread may ask.
        """
        size, known = self.pool.page_size, request.keys
        if not self.pool.enable_prefix_caching or not request.uses_prefix_cache:
            return 0
        found, parent, pages = 0, self._root(request), list[int]()
        while (found + 1) * size < request.num_tokens:
            begin = found * size
            tokens = request.key_ids(begin, begin + size)
            key = known[found] if found < len(known) else page_key(parent, tokens)
            held = self.pool.match((key,)) or self.swap.match((key,))
            if not held and key.digest not in self.pending:
                break
            found, parent = found + 1, key.digest
            pages += self.pool.match((key,)) if len(pages) == found - 1 else ()
        if self.groups is not None and (len(pages) == found or self.groups.states is not None):
            found = self.groups.longest(pages).num_pages
        return found * size

    def acquire(self, request: Request, found: Sequence[Prefix], spare: int) -> int:
        """Give each sequence of ``request`` pages for all its tokens: those ``found``, then new
        ones, the first of which may be a copy (``Prefix.tail``).

        Returns 0, or the number of new pages if there are too few; then nothing changed. With tiers
        it counts only pages of the first one, so that it is never more than what is needed.
        """
        pool, size, sequences = self.pool, self.pool.page_size, request.sequences
        num_new = [
            -(-one.num_tokens // size) - len(prefix.pages)
            for one, prefix in zip(sequences, found, strict=True)
        ]
        keys = [key for prefix in found for key in prefix.swapped]
        tiers = [self.swap.tier(key) for key in keys]
        held = self.swap.hold(self._stored_places(request, found))
        hits = [page for prefix in found for page in prefix.pages]
        sources = [prefix.tail.page for prefix in found if prefix.tail is not None]
        hits += sources  # not evicted for the new pages
        if self.groups is not None:
            pages = self._acquire_in_groups(request, found, hits, sum(num_new), spare, held)
        else:
            pages = pool.acquire(hits, sum(num_new), spare=spare, tiers=tiers)
        if pages is None:
            self.swap.put_back(held)
            return sum(num_new) - sum(tier > 0 for tier in tiers)
        loaded, new = pages[len(hits) :][: len(keys)], pages[len(hits) + len(keys) :]
        for one, prefix, num in zip(sequences, found, num_new, strict=True):
            count = len(prefix.swapped)
            back, loaded = loaded[:count], loaded[count:]
            one.pages, new = prefix.pages + back + new[: num - count], new[num - count :]
            for key, page in zip(prefix.swapped, back, strict=True):
                self.swap.load(held[key, 0], pool.location(page))
                pool.unconfirmed.add(page)
                self._publish(page, key)
            if (end := prefix.hit.tail) is not None:
                self.swap.load(held[end, 0], one.pages[prefix.num_pages])
            if self._swapped is not None:
                self._swapped.attach(one, prefix.hit)
            one.num_computed = prefix.num_tokens(size)
            one.num_published = prefix.num_pages
            one.publishes = pool.enable_prefix_caching
            if self.groups is not None and self.groups.saves is not None:
                self.groups.saves.save_ends(one, prefix.num_known)
            if request.num_preemptions == 0 and one.uses_prefix_cache:
                pool.queries += (one.num_tokens - 1) // size
                pool.hits += len(prefix.pages)
            for key in one.keys[prefix.num_pages :]:
                self.pending.setdefault(key.digest, one)
            if prefix.tail is not None:
                self._duplicate(prefix.tail, one, prefix.num_pages)
        self.swap.put_back(held)
        pool.release(sources)
        if self.groups is not None:
            self.groups.drop_sources(self._tail_frames(self.groups, found))
        return 0

    def _stored_places(
        self, request: Request, found: Sequence[Prefix]
    ) -> list[tuple[PageKey, int]]:
        """What a request needs of the swap space: keys and regions."""
        places: list[tuple[PageKey, int]] = []
        for one, prefix in zip(request.sequences, found, strict=True):
            places += [(key, 0) for key in prefix.swapped]
            if prefix.hit.tail is not None:
                places.append((prefix.hit.tail, 0))
            if self._swapped is not None:
                places += self._swapped.places_of(prefix.hit, one.keys)
        return places

    def _tail_frames(self, groups: Groups, found: Sequence[Prefix]) -> list[list[int]]:
        """The frames of the tails found, by group."""
        frames = []
        for prefix in found:
            if (tail := prefix.tail) is not None:
                one = groups.tail_frames(tail.page, tail.writer, prefix.num_pages)
                assert one is not None
                frames.append(one)
        return frames

    def missing(self, request: Request, found: Sequence[Prefix], num_pages: int) -> int:
        """With groups: the bytes that are missing to start a request with these hits and
        ``num_pages`` other pages."""
        assert self.groups is not None
        sources = self._tail_frames(self.groups, found)
        return self.groups.missing_for(request, [one.hit for one in found], sources, num_pages)

    def missing_pages(self, request: Request, found: Sequence[Prefix], num_pages: int) -> int:
        """:meth:`missing` in pages, which may be evicted hits too."""
        idle = self.pool.count_idle([page for prefix in found for page in prefix.pages])
        return -(-self.missing(request, found, num_pages + idle) // max(self.pool.unit_bytes, 1))

    def num_held(self, sequence: Request) -> int:
        """What a running sequence holds, in pages; with groups, also its frames and slots."""
        return len(sequence.pages) if self.groups is None else self.groups.size_in_pages(sequence)

    def _acquire_in_groups(
        self,
        request: Request,
        found: Sequence[Prefix],
        hits: list[int],
        num_new: int,
        spare: int,
        held: Holds,
    ) -> list[int] | None:
        """The pages of a request, and frames and slots for it; ``None``: something is missing."""
        pool, groups = self.pool, self.groups
        assert groups is not None
        idle = pool.count_idle(hits)
        missing = self.missing(request, found, num_new + idle + spare)
        if missing and pool.on_shortage is not None:  # granted as pages, for all kinds
            pool.on_shortage(-(-missing // max(pool.unit_bytes, 1)), True)
            missing = self.missing(request, found, num_new + idle + spare)
        if missing:
            return None
        pool.acquire(hits, 0)
        sources = self._tail_frames(groups, found)
        groups.begin(request, [one.hit for one in found], sources, num_new + spare, held)
        new = pool.acquire((), num_new, spare=spare)
        assert new is not None, "pages are missing"
        return hits + new

    def _duplicate(self, tail: Tail, sequence: Request, index: int) -> None:
        """Copy a page with the first tokens of page ``index`` of a sequence."""
        pool, page = self.pool, sequence.pages[index]
        pool.copies.append(Duplicate(pool.location(tail.page), pool.location(page)))
        pool.unconfirmed.add(page)
        if (groups := self.groups) is not None:
            frames = groups.tail_frames(tail.page, tail.writer, index)
            assert frames is not None
            groups.copy_tail(sequence, frames, index)

    def publish(self, request: Request, num_full: int) -> None:
        """Make the pages known that a committed step has filled."""
        if num_full > len(request.keys):
            self.extend_keys(request, num_full)
        for index in range(request.num_published, num_full):
            key = request.keys[index]
            self._publish(request.pages[index], key)
            if self.groups is not None:
                self.groups.publish(request, index, key)
            self.tails.writers[key.digest] = request
            if self.pending.get(key.digest) is request:
                del self.pending[key.digest]
        request.num_published = num_full

    def _publish(self, page: int, key: PageKey) -> None:
        """Make a page known, unless one with the same key is pinned: that one must stay known, even
        if the new one has more bits.
        """
        if not self._pinned or self._pinned.isdisjoint(self.pool.match([key])):
            self.pool.publish(page, key)

    def release(self, sequence: Request) -> None:
        """Take the pages of a running sequence, and those it was about to publish."""
        self.tails.forget(sequence)
        if self.groups is not None:
            self.groups.release(sequence)
        self.pool.release(sequence.pages)
        for key in sequence.keys[sequence.num_published :]:
            if self.pending.get(key.digest) is sequence:
                del self.pending[key.digest]
        sequence.pages = []

    def may_rewrite(self, sequence: Request, num_tokens: int) -> bool:
        """Whether a running sequence may write the tokens after its first ``num_tokens - 1`` again:
        their pages are its own, and in the first tier.
        """
        first = (num_tokens - 1) // self.pool.page_size
        if sequence.num_published > first:
            return False
        if self.groups is not None and not self.groups.sees(sequence, num_tokens - 1):
            return False
        tiered = self._tiered
        return tiered is None or not any(map(tiered.tier, sequence.pages[first:]))

    def forget_keys(self, sequence: Request) -> None:
        """A sequence has lost its last tokens, so pages that it promised will hold others."""
        num_full = sequence.num_tokens // self.pool.page_size
        for key in sequence.keys[num_full:]:
            if self.pending.get(key.digest) is sequence:
                del self.pending[key.digest]
        del sequence.keys[num_full:]

    def keep_tail(self, sequence: Request) -> None:
        """A sequence has ended: keep its last page, which is not full, for one that goes on. And
        keep its state.

        Not with tiers: they count on known pages being full.
        """
        if not sequence.publishes or self._tiered is not None:
            return
        page, groups = self.tails.keep(sequence, self._root(sequence)), self.groups
        if groups is None:
            return
        full, rest = divmod(sequence.num_computed, self.pool.page_size)
        if not rest and full and full == sequence.num_published:
            page = next(iter(self.pool.match((sequence.keys[full - 1],))), 0)
        if page:
            groups.keep(sequence, page, full if rest else full - 1)

    def invalidate(self, sequence: Request) -> None:
        """Remove a sequence's pages from cache and swap space: they may hold NaN."""
        for page in sequence.pages:
            if (key := self.pool.key(page)) is not None:
                self.swap.drop(key.digest)
        self.forget(set(sequence.pages))

    def forget(self, gone: set[int]) -> None:
        """Make these pages unknown, and unpin the prefixes that contain them."""
        for last, pages in list(self._pins.items()):
            if not gone.isdisjoint(pages):
                self._unpin(last)
        self.pool.forget(gone)

    def reset(self) -> None:
        """Forget all prefixes, pinned ones too."""
        self.unpin_all()
        self.pool.reset_prefix_cache()
        self.swap.clear()
        self.tails.clear()
        self.pending.clear()

    def undo(self, copies: Iterable[Copy]) -> None:
        """Forget the targets of the last plan's copies: it is unknown whether they were made."""
        outs = (one.slots for one in copies if isinstance(one, Swap) and one.out)
        self.swap.forget(chain.from_iterable(outs))
        self.forget(self.pool.unconfirmed)
        self.pool.confirm_copies()

    # Pins

    @property
    def num_pinned(self) -> int:
        """Pages of pinned prefixes."""
        return len(self._pinned)

    def check_groups(self, sequences: Sequence[Request]) -> None:
        """Assert that frames and slots are accounted for (tests)."""
        if self.groups is not None:
            self.groups.check(sequences, list(self._pinned_groups.values()))

    @property
    def pins(self) -> list[tuple[int, ...]]:
        """The page tables of all pins."""
        return list(self._pins.values())

    def available_pages(self, request: Request) -> int:
        """Pages that a request (with its negative sequence) could get if nothing else ran: all
        except the pinned ones that it does not share.
        """
        if self.groups is not None:
            unpinned = self.groups.most_pages(len(request.sequences), len(self._pinned))
        else:
            unpinned = self.pool.capacity - len(self._pinned)
        if not self._pinned:
            return unpinned
        own: set[int] = set()
        for sequence in request.sequences:
            if sequence.pages:  # possibly its own copies of pinned pages
                own.update(sequence.pages)
            elif sequence.uses_prefix_cache:
                self.extend_keys(sequence, sequence.num_tokens // self.pool.page_size)
                keys = sequence.keys[: (sequence.num_tokens - 1) // self.pool.page_size]
                own.update(self.pool.match(keys))
        return unpinned + len(own & self._pinned)

    def pin(self, keys: Sequence[PageKey]) -> bool:
        """Keep these cached pages until ``unpin``. False: at least one is not cached."""
        pages = self.pool.match(keys)
        if len(pages) < len(keys):
            return False
        if keys[-1].digest not in self._pins:
            if self.groups is not None:
                pinned = self.groups.pin(pages)
                if pinned is None:
                    return False
                self._pinned_groups[keys[-1].digest] = pinned
            self.pool.acquire(pages, 0)
            self._pins[keys[-1].digest] = tuple(pages)
            self._pinned.update(pages)
        return True

    def unpin(self, keys: Sequence[PageKey]) -> bool:
        """Remove the pin of exactly these pages. False: there is none."""
        if not keys or keys[-1].digest not in self._pins:
            return False
        self._unpin(keys[-1].digest)
        return True

    def unpin_all(self) -> None:
        """Remove all pins."""
        for last in list(self._pins):
            self._unpin(last)

    def _unpin(self, last: bytes) -> None:
        self.pool.release(self._pins.pop(last))
        if self.groups is not None:
            self.groups.unpin(self._pinned_groups.pop(last))
        self._pinned = {page for pages in self._pins.values() for page in pages}
