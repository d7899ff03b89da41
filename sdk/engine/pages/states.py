"""Slots of recurrent states: working ones of running sequences, and snapshots of prefixes.

A recurrent state has one size however many tokens it has read, and cannot be taken back to fewer.
So a request that continues a known prefix needs a *snapshot*: a slot attached to a known page, with
the state after the last token of the page (or of the tail in it).

*Eviction.* What a snapshot saves are the tokens since the snapshot before it in its prefix, which
would run again without it. The one with the smallest ``clock + uses * tokens`` is evicted, and
``clock`` becomes that value, as in ``cost_eviction.py``. If a snapshot goes, those that came after
it save its tokens too.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

#: More uses than this do not count.
_MOST_USES = 4
#: The end of an answer counts as used so often from the start: the next turn goes on from there.
#: What it saves is otherwise no more than the tokens since the last page boundary, so that of two
#: answers the older one's prompt would stay and the newer one's end would go (docs/log/models.md).
USES_OF_END = 3


class StateSlots(NamedTuple):
    """The memory of recurrent states: ``num_slots`` of ``slot_bytes``, all layers in one, slot 0
    reserved. ``drafts``: the most drafts of a row; a sequence has one slot more than that.
    ``num_rounded`` places of ``rounded_bytes``, the first reserved: those of snapshots in 16 bits;
    0: snapshots are in slots."""

    slot_bytes: int
    num_slots: int
    drafts: int = 0
    rounded_bytes: int = 0
    num_rounded: int = 0

    @property
    def nbytes(self) -> int:
        """All of it that may be used."""
        rounded = max(self.num_rounded - 1, 0) * self.rounded_bytes
        return (self.num_slots - 1) * self.slot_bytes + rounded

    @property
    def of_snapshots(self) -> StateSlots | None:
        """The places of snapshots in 16 bits."""
        return StateSlots(self.rounded_bytes, self.num_rounded) if self.num_rounded else None


class StateSnapshot:
    """The state after the first ``num_tokens`` tokens of a prefix, in ``slot``; ``page`` holds the
    last of them (0: it was evicted). ``parent``: the snapshot before it in the prefix."""

    __slots__ = (
        "children",
        "entry",
        "held",
        "num_tokens",
        "page",
        "parent",
        "slot",
        "uses",
        "value",
    )

    def __init__(self, slot: int, page: int, num_tokens: int, parent: StateSnapshot | None) -> None:
        self.slot = slot
        self.page = page
        self.num_tokens = num_tokens
        self.parent = parent
        self.children: set[StateSnapshot] = set()
        self.uses = 1
        self.value = 0.0
        self.entry = 0  # of the heap; 0: held
        self.held = 0  # by pins, and by plans that read it

    @property
    def cost(self) -> int:
        """The tokens that run again without it."""
        return self.num_tokens - (0 if self.parent is None else self.parent.num_tokens)


def living(snapshot: StateSnapshot | None) -> StateSnapshot | None:
    """The snapshot itself, or the last one before it in its prefix that was not evicted."""
    while snapshot is not None and not snapshot.page:
        snapshot = snapshot.parent
    return snapshot


class WorkingState:
    """The state of one running sequence.

    ``slots[current]`` has it once the sequence ``has_run``; before, the slot ``initial`` has it
    (-1: zeros), which is that of ``read``, a snapshot that is held until then, or ``slots[0]``,
    into which the state is copied from the swap space. ``save_at``: numbers of tokens after which a
    snapshot is taken, ``saving`` those in flight with their slots, ``last`` the last one taken or
    read, ``rolling`` the last one of its answer.
    """

    __slots__ = (
        "current",
        "has_run",
        "initial",
        "last",
        "num_planned",
        "read",
        "rolling",
        "save_at",
        "saving",
        "slots",
    )

    def __init__(self, initial: StateSnapshot | None, num_tokens: int) -> None:
        self.slots: list[int] = []
        self.current = 0
        self.has_run = False
        self.initial = -1 if initial is None else initial.slot
        self.save_at: list[int] = []
        self.saving: list[tuple[int, int]] = []
        self.last = self.read = initial
        self.rolling: StateSnapshot | None = None
        self.num_planned = num_tokens

    @property
    def awaits_step(self) -> bool:
        """Whether anything changes once a row without drafts has run."""
        return bool(self.saving or self.save_at) or not self.has_run


class StatePool:
    """The slots ``1 .. num_slots - 1``. Not thread-safe."""

    def __init__(self, slots: StateSlots) -> None:
        self.unit_bytes = slots.slot_bytes
        self.num_slots = slots.num_slots
        self.num_working = slots.drafts + 1  # of a sequence
        self.capacity = 0
        self.num_pinned = 0
        self.evictions = 0
        #: Called with a number of missing slots before a snapshot is evicted.
        self.on_shortage: Callable[[int], None] | None = None
        #: Called with a snapshot before it is evicted.
        self.on_evict: Callable[[StateSnapshot], None] | None = None
        self._withheld = list(range(slots.num_slots - 1, 0, -1))
        self._free: list[int] = []
        self._snapshots: dict[int, StateSnapshot] = {}  # by page
        self._heap: list[tuple[float, int, StateSnapshot]] = []  # also outdated entries
        self._num_entries = 0
        self._num_evictable = 0
        self._clock = 0.0

    # Memory (budget.Places)

    @property
    def num_withheld(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return len(self._withheld)

    @property
    def num_spare(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return len(self._free) + self._num_evictable

    @property
    def unused(self) -> list[int]:
        """Places without content."""
        return list(self._free)

    @property
    def num_unused(self) -> int:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        return len(self._free)

    @property
    def num_snapshots(self) -> int:
        """Slots attached to pages."""
        return len(self._snapshots)

    def take_away(self, count: int) -> list[int]:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        taken = self._free[:count]
        del self._free[:count]
        while len(taken) < count and self._num_evictable:
            taken.append(self._evict())
        self._withheld += taken
        self.capacity -= len(taken)
        return taken

    def give(self, count: int) -> list[int]:
        """See :class:`~sdk.engine.pages.budget.Places`."""
        kept = max(len(self._withheld) - count, 0)
        given = self._withheld[kept:]
        del self._withheld[kept:]
        self._free += given
        self.capacity += len(given)
        return given

    # Slots

    def take(self, count: int) -> list[int]:
        """Slots for a sequence to work in; there are as many spare ones."""
        return [self._free.pop() if self._free else self._evict() for _ in range(count)]

    def take_for_snapshot(self, cost: int) -> int:
        """A slot for a snapshot that saves ``cost`` tokens; 0: all others save more."""
        if not self._free and self.on_shortage is not None:
            self.on_shortage(1)
        if self._free:
            return self._free.pop()
        first = self._first()
        if first is None or first.value > self._clock + cost:
            return 0
        return self._evict()

    def give_back(self, slots: Iterable[int]) -> None:
        """The content of these is not needed any more."""
        self._free += slots

    # Snapshots

    def of(self, page: int) -> StateSnapshot | None:
        """The snapshot attached to a page."""
        return self._snapshots.get(page)

    def last_of(self, pages: Sequence[int]) -> StateSnapshot | None:
        """The last snapshot of known pages."""
        found = (self.of(page) for page in reversed(pages))
        return next((one for one in found if one is not None), None)

    def attach(
        self,
        page: int,
        slot: int,
        num_tokens: int,
        before: StateSnapshot | None,
        uses: int = 1,
    ) -> StateSnapshot:
        """``slot`` has the state after ``num_tokens`` tokens, the last of which is in a known page.
        If the page has a snapshot already, that one stays. ``before``: an earlier one. ``uses``:
        as how many it counts."""
        found = self._snapshots.get(page)
        if found is not None:
            self._free.append(slot)
            self.expect(found, uses)
            return found
        parent = living(before)
        snapshot = self._snapshots[page] = StateSnapshot(slot, page, num_tokens, parent)
        snapshot.uses = uses
        if parent is not None:
            parent.children.add(snapshot)
        self._offer(snapshot)
        return snapshot

    def use(self, snapshot: StateSnapshot) -> None:
        """A request continues from it."""
        self.expect(snapshot, min(snapshot.uses + 1, _MOST_USES))

    def expect(self, snapshot: StateSnapshot, uses: int) -> None:
        """It counts as used so often, if it was used less."""
        if uses > snapshot.uses:
            snapshot.uses = uses
        if snapshot.entry:
            self._withdraw(snapshot)
            self._offer(snapshot)

    def hold(self, snapshot: StateSnapshot) -> None:
        """Keep it until :meth:`drop`."""
        if not snapshot.held:
            self._withdraw(snapshot)
        snapshot.held += 1

    def drop(self, snapshot: StateSnapshot) -> None:
        """It is held once less."""
        snapshot.held -= 1
        if not snapshot.held:
            if snapshot.page:
                self._offer(snapshot)
            else:  # detached meanwhile
                self._free.append(snapshot.slot)

    def detach(self, page: int) -> None:
        """A page is not known any more."""
        snapshot = self._snapshots.get(page)
        if snapshot is not None:
            if snapshot.entry:
                self._withdraw(snapshot)
            self._unlink(snapshot)
            if not snapshot.held:
                self._free.append(snapshot.slot)

    def detach_all(self) -> None:
        """No page is known any more."""
        for page in list(self._snapshots):
            self.detach(page)

    def _unlink(self, snapshot: StateSnapshot) -> None:
        del self._snapshots[snapshot.page]
        snapshot.page = 0
        parent = living(snapshot.parent)
        if parent is not None:
            parent.children.discard(snapshot)
        for child in snapshot.children:
            child.parent = parent
            if parent is not None:
                parent.children.add(child)
            if child.entry:
                self._withdraw(child)
                self._offer(child)
        snapshot.children = set()

    def _offer(self, snapshot: StateSnapshot) -> None:
        """It may be evicted from now on."""
        self._num_entries += 1
        self._num_evictable += 1
        snapshot.entry = self._num_entries
        snapshot.value = self._clock + snapshot.uses * snapshot.cost
        heapq.heappush(self._heap, (snapshot.value, snapshot.entry, snapshot))
        if len(self._heap) > 2 * self._num_evictable + 64:
            self._heap = [one for one in self._heap if one[2].entry == one[1]]
            heapq.heapify(self._heap)

    def _withdraw(self, snapshot: StateSnapshot) -> None:
        snapshot.entry = 0
        self._num_evictable -= 1

    def _first(self) -> StateSnapshot | None:
        """The one to be evicted first."""
        while self._heap and self._heap[0][2].entry != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def _evict(self) -> int:
        snapshot = self._first()
        assert snapshot is not None, "no slot is spare"
        self._clock = max(self._clock, snapshot.value)
        if self.on_evict is not None:
            self.on_evict(snapshot)
        self._withdraw(snapshot)
        self._unlink(snapshot)
        self.evictions += 1
        return snapshot.slot

    def check(self, working: Iterable[int], held: Iterable[StateSnapshot], known: set[int]) -> None:
        """Assert that all counts agree. ``working``: slots of sequences, and those that plans in
        flight write snapshots to."""
        working, held = list(working), list(held)
        snapshots = list(self._snapshots.values())
        attached = [one.slot for one in snapshots]
        detached = {one.slot for one in held if not one.page}
        slots = [*self._free, *self._withheld, *attached, *working, *detached]
        assert sorted(slots) == list(range(1, self.num_slots)), "a slot is lost or used twice"
        assert self.capacity + len(self._withheld) == self.num_slots - 1, "capacity is wrong"
        assert self._snapshots.keys() <= known, "an unknown page has a snapshot"
        for page, one in self._snapshots.items():
            assert one.page == page, "a snapshot is at another page"
            assert one.held == sum(other is one for other in held), "held snapshots differ"
            assert bool(one.entry) != bool(one.held), "a held snapshot may be evicted"
            assert one.parent is None or one in one.parent.children, "links differ"
            assert one.cost > 0, "a snapshot comes before the one before it"
        assert self._num_evictable == sum(one.entry > 0 for one in snapshots)
