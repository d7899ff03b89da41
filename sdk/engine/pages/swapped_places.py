"""Frames and recurrent states in the swap space: what goes there when it is evicted, and what a
request that starts takes from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from sdk.engine.pages.frames import FramePool
from sdk.engine.pages.page_pool import PageKey, PagePool
from sdk.engine.pages.states import StatePool, StateSnapshot
from sdk.engine.pages.swap import Holds, Slots, SwapSpace
from sdk.engine.plan import StateCopy
from sdk.engine.scheduling.request import Request


class Hit(NamedTuple):
    """The longest known prefix that all groups can serve: its full pages, the frames that the next
    token sees (by group, of the last pages), and the snapshot of its last token.

    From the swap space come: frames that are 0, the state of ``state``, and the page after the full
    ones if there is a ``tail``.
    """

    num_pages: int
    frames: tuple[tuple[int, ...], ...] = ()
    snapshot: StateSnapshot | None = None
    state: PageKey | None = None
    tail: PageKey | None = None

    @property
    def end(self) -> int:
        """The page after the last one with a frame."""
        return self.num_pages + (self.tail is not None)


NO_HIT = Hit(0)


class SwappedPlaces:
    """The frames and states of one scheduler that are in the swap space. Region ``1 + g`` is that
    of window group g, and the one after them that of states: snapshots as they are kept, in 16 bits
    if it ``rounds`` them."""

    def __init__(
        self,
        swap: SwapSpace,
        pool: PagePool,
        frames: Sequence[FramePool],
        snapshots: StatePool | None,
        *,
        rounds: bool = False,
    ) -> None:
        self._swap = swap
        self._pool = pool
        self._frames = list(frames)
        self._snapshots = snapshots
        self._rounds = rounds
        self._state_region = 1 + len(frames)
        for group, kind in enumerate(frames, 1):
            kind.on_evict = partial(self._store_frame, kind, group)
        if snapshots is not None:
            snapshots.on_evict = self._store_state

    def store(self, page: int) -> None:
        """A page is about to be evicted, and goes to the swap space: so does what belongs to it."""
        for group, pool in enumerate(self._frames, 1):
            [frame] = pool.frames_of((page,))
            if frame:
                self._store_frame(pool, group, frame, page)
        if self._snapshots is not None and (snapshot := self._snapshots.of(page)) is not None:
            self._store_state(snapshot)

    def _store_frame(self, pool: FramePool, group: int, frame: int, page: int) -> None:
        key = self._pool.key(page)
        if key is not None and not pool.is_passed(frame):
            self._swap.store(frame, key, group)

    def _store_state(self, snapshot: StateSnapshot) -> None:
        key = self._pool.key(snapshot.page)
        if key is not None:
            self._swap.store(snapshot.slot, key, self._state_region)

    def has_state(self, key: PageKey) -> bool:
        """Whether the state after a page or a tail is there."""
        return self._swap.has(key, self._state_region)

    def last_without(
        self,
        group: int,
        pages: Sequence[int],
        swapped: Sequence[PageKey],
        first: int,
    ) -> int:
        """The last page from ``first`` on, of cached ``pages`` and the ``swapped`` ones after them,
        whose frame is in neither place; -1: there is none."""
        pool = self._frames[group - 1]
        for index in range(len(pages) + len(swapped) - 1, first - 1, -1):
            if index >= len(pages):
                key: PageKey | None = swapped[index - len(pages)]
            elif any(pool.frames_of(pages[index : index + 1])):
                continue
            else:
                key = self._pool.key(pages[index])
            if key is None or not self._swap.has(key, group):
                return index
        return -1

    def places_of(self, hit: Hit, keys: Sequence[PageKey]) -> list[tuple[PageKey, int]]:
        """What a hit needs besides pages: keys and regions. ``keys``: those of the sequence."""
        found: list[tuple[PageKey, int]] = []
        for group, frames in enumerate(hit.frames, 1):
            for index, frame in enumerate(frames, hit.end - len(frames)):
                if not frame:
                    found.append((self._key_at(hit, keys, index), group))
        if hit.state is not None:
            found.append((hit.state, self._state_region))
        return found

    @staticmethod
    def _key_at(hit: Hit, keys: Sequence[PageKey], index: int) -> PageKey:
        return hit.tail if hit.tail is not None and index == hit.num_pages else keys[index]

    def load(self, sequence: Request, hit: Hit, held: Holds) -> None:
        """Copy what a sequence needs into its frames and its slot."""
        swap = self._swap
        for group, (pool, own) in enumerate(zip(self._frames, sequence.windows, strict=True), 1):
            for index, frame in pool.fill(own):
                swap.load(held[self._key_at(hit, sequence.keys, index), group], frame, group)
        if hit.state is not None:
            assert sequence.state is not None
            slot = sequence.state.initial = sequence.state.slots[0]
            self._load_state(held[hit.state, self._state_region], slot)

    def _load_state(self, held: Slots, slot: int) -> None:
        """Copy a state into a slot; rounded ones come through a place that is spare."""
        if not self._rounds:
            self._swap.load(held, slot, self._state_region)
            return
        assert self._snapshots is not None
        [place] = self._snapshots.take(1)
        self._swap.load(held, place, self._state_region)
        self._pool.copies.append(StateCopy(slot, place, out=False))
        self._snapshots.give_back((place,))

    def attach(self, sequence: Request, hit: Hit) -> None:
        """The pages of a sequence that starts are known: the frames that it loads belong to them,
        as soon as they are copied."""
        for pool, held, frames in zip(self._frames, sequence.windows, hit.frames, strict=True):
            for index, frame in enumerate(frames, hit.end - len(frames)):
                if not frame and index < hit.num_pages:
                    page = sequence.pages[index]
                    if self._pool.key(page) is not None:
                        self._pool.unconfirmed.add(page)
                        pool.attach(page, held.frame(index))
        if hit.state is not None and self._snapshots is not None and sequence.state is not None:
            known = sequence.pages[: hit.num_pages]
            sequence.state.last = self._snapshots.last_of(known)
