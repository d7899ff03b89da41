"""Which slots the sequences that run work in, and where snapshots of their states are taken.

States that take no more than a few pages (short convolutions) are saved at every page. Of larger
ones a snapshot is taken where another request is likely to go on:

- at the last page boundary of a prompt, for the same prompt again and for pins;
- where the known pages of a prompt end, if no snapshot is there: a second request has left a prefix
  at this point, and a third will. A request that comes while the first one still computes its
  prompt lets that one take it, and waits;
- at the end of an answer, and when a request is preempted: its working slot becomes the snapshot;
- at the last page boundary of an answer that runs, for a request that goes on with a part of it.

Snapshots in 16 bits are in a memory of their own: a step writes the exact state into a slot, which
is rounded before the next step and given back; a request that starts from one gets it in its slot.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from sdk.engine.pages.page_pool import PagePool
from sdk.engine.pages.states import (
    USES_OF_END,
    StatePool,
    StateSnapshot,
    WorkingState,
    living,
)
from sdk.engine.plan import StateCopy, StateSave
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler_config import SchedulerConfig

#: States of up to this many pages are saved at every page.
_SMALL = 4


def mark(digest: bytes) -> bytes:
    """What stands among the pending pages for the snapshot of a page."""
    return b"state" + digest


class StateSaves:
    """Takes slots and snapshots for sequences: ``states`` has the slots, ``snapshots`` the places
    of snapshots, which are slots too unless they have 16 bits. Not thread-safe."""

    def __init__(
        self, states: StatePool, snapshots: StatePool, pool: PagePool, config: SchedulerConfig
    ) -> None:
        self._states = states
        self._snapshots = snapshots
        self._rounds = snapshots is not states
        self._pool = pool
        self._size = config.page_size
        page_bytes = config.page_bytes + sum(group.frame_bytes for group in config.windows)
        self._everywhere = snapshots.unit_bytes <= _SMALL * page_bytes
        self._saves: list[StateSave] = []  # of that plan
        #: Marks of snapshots that running sequences will take.
        self.pending: dict[bytes, Request] = {}

    # Starting

    def read(self, sequence: Request, snapshot: StateSnapshot | None, num_tokens: int) -> None:
        """A sequence starts after ``num_tokens`` tokens, with this snapshot: keep it until the
        first row of the sequence has run, which may be in a later step than that of its request's
        other sequence."""
        sequence.state = WorkingState(snapshot, num_tokens)
        if snapshot is not None:
            self._snapshots.use(snapshot)
            self._snapshots.hold(snapshot)

    def begin(self, sequence: Request) -> None:
        """Give a sequence its slots; there are as many spare ones."""
        state = sequence.state
        assert state is not None
        state.slots = self._states.take(self._states.num_working)
        if self._rounds and state.read is not None:
            state.initial = state.slots[0]
            self._pool.copies.append(StateCopy(state.initial, state.read.slot, out=False))

    def _drop_read(self, state: WorkingState) -> None:
        if state.read is not None:
            self._snapshots.drop(state.read)
            state.read = None

    def save_ends(self, sequence: Request, num_known: int) -> None:
        """Note where a sequence that starts takes snapshots. ``num_known``: its leading pages that
        were known."""
        size, num_tokens = self._size, sequence.num_tokens
        if sequence.publishes:
            for end in {num_known, (num_tokens - 1) // size, num_tokens // size}:
                self.save_at(sequence, end)

    def save_at(self, sequence: Request, num_pages: int) -> bool:
        """Let a running sequence take a snapshot after so many full pages. False: it is too
        late."""
        state, num_tokens = sequence.state, num_pages * self._size
        if state is None or not sequence.publishes or num_tokens <= state.num_planned:
            return False
        if num_tokens not in state.save_at:
            insort(state.save_at, num_tokens)
            self.pending.setdefault(mark(sequence.keys[num_pages - 1].digest), sequence)
        return True

    # Steps

    def plan(self, sequence: Request, num_tokens: int) -> None:
        """A sequence runs ``num_tokens`` known tokens: choose the snapshots that it takes."""
        state, size = sequence.state, self._size
        assert state is not None
        begin, end = sequence.num_computed, sequence.num_computed + num_tokens
        state.num_planned = end
        if not sequence.publishes:
            return
        if self._everywhere:
            ends = list(range((begin // size + 1) * size, end + 1, size))
        else:
            ends = [one for one in state.save_at if begin < one <= end]
            if num_tokens == 1 and end % size == 0 and not ends:
                ends = [end]
        last = living(state.last)
        before = 0 if last is None else last.num_tokens
        for one in ends:
            slot = self._states.take_for_snapshot(one - before)
            if slot:
                state.saving.append((one, slot))
                self._saves.append(StateSave(sequence.request_id, one, slot))
                before = one

    def take(self) -> tuple[StateSave, ...]:
        """The snapshots of the plan that is about to run."""
        if not self._saves:
            return ()
        found = tuple(self._saves)
        self._saves.clear()
        return found

    def ran(self, sequence: Request, num_tokens: int, drafts: bool) -> None:
        """A step has run ``num_tokens`` tokens of a sequence, the accepted drafts included. What
        it filled is known by now."""
        state = sequence.state
        assert state is not None
        state.has_run = True
        self._drop_read(state)
        if drafts:
            state.current = (state.current + num_tokens) % len(state.slots)
        for end, slot in state.saving:
            self._save(sequence, state, end, slot)
        state.saving = []
        while state.save_at and state.save_at[0] <= sequence.num_computed:
            self._forget_mark(sequence, state.save_at.pop(0) // self._size)

    def _save(self, sequence: Request, state: WorkingState, end: int, slot: int) -> None:
        """A step has written a snapshot."""
        pages = self._pool.match(sequence.keys[end // self._size - 1 : end // self._size])
        last = living(state.last)
        if not pages or (last is not None and last.num_tokens >= end):
            self._states.give_back((slot,))  # the page is not certain, or not cached
            return
        if self._rounds:
            self._states.give_back((slot,))
        place = self._place(slot, pages[0], end, last)
        if not place:
            return
        state.last = self._snapshots.attach(pages[0], place, end, last)
        if self._everywhere or end in state.save_at:
            return
        rolling, state.rolling = state.rolling, state.last
        if rolling is not None and rolling.page and rolling.uses == 1 and not rolling.held:
            self._snapshots.detach(rolling.page)

    def _place(self, slot: int, page: int, num_tokens: int, before: StateSnapshot | None) -> int:
        """Where the state in a slot is kept as a snapshot of ``page``: there, or rounded before the
        slot is written again. 0: others save more."""
        if not self._rounds:
            return slot
        cost = num_tokens - (0 if before is None else before.num_tokens)
        place = self._snapshots.take_for_snapshot(cost)
        if place and self._pool.key(page) is None:  # evicted to make room
            self._snapshots.give_back((place,))
            return 0
        if place:
            self._pool.copies.append(StateCopy(slot, place, out=True))
            self._pool.unconfirmed.add(page)
        return place

    def _forget_mark(self, sequence: Request, num_pages: int) -> None:
        if num_pages <= len(sequence.keys):
            one = mark(sequence.keys[num_pages - 1].digest)
            if self.pending.get(one) is sequence:
                del self.pending[one]

    def keep(self, sequence: Request, page: int) -> None:
        """The working slot of a sequence, which ends, becomes the snapshot of ``page``, which has
        its last token."""
        state = sequence.state
        if state is None or not state.has_run:
            return
        last = living(state.last)
        if last is None or last.num_tokens < sequence.num_computed:
            tokens = sequence.num_computed
            place = self._place(state.slots[state.current], page, tokens, last)
            if not self._rounds:
                del state.slots[state.current]
            if place:
                state.last = self._snapshots.attach(page, place, tokens, last, USES_OF_END)
        else:
            self._snapshots.expect(last, USES_OF_END)

    def release(self, sequence: Request) -> None:
        """A sequence gives its slots back."""
        state, sequence.state = sequence.state, None
        if state is None:
            return
        self._drop_read(state)
        self._states.give_back(state.slots)
        self._states.give_back(slot for _, slot in state.saving)
        self._saves = [one for one in self._saves if one.request_id != sequence.request_id]
        for end in state.save_at:
            self._forget_mark(sequence, end // self._size)

    def check(self, sequences: Sequence[Request], pins: Sequence[StateSnapshot]) -> None:
        """Assert that all slots are accounted for."""
        working, held = [], list(pins)
        for sequence in sequences:
            state = sequence.state
            assert state is not None and len(state.slots) == self._states.num_working
            working += [*state.slots, *(slot for _, slot in state.saving)]
            held += [] if state.read is None else [state.read]
        pool = self._pool
        known = {page for page in range(1, pool.num_pages) if pool.key(page) is not None}
        self._snapshots.check([] if self._rounds else working, held, known)
        if self._rounds:
            self._states.check(working, [], known)
        assert set(self.pending.values()) <= set(sequences), "a snapshot is promised by nobody"
