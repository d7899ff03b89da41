"""The books of the swap space: slots, their order, and copies in the order they are made."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from sdk.engine.pages.buddy import BuddyAllocator
from sdk.engine.pages.page_pool import PageKey, page_key, root_digest
from sdk.engine.pages.swap import SwapSpace
from sdk.engine.plan import Copy, Swap
from sdk.kernels.kv.tiers import page_id, page_tier


def _chain(length: int) -> list[PageKey]:
    """The keys of one prefix of this many pages of two tokens."""
    keys: list[PageKey] = []
    parent = root_digest(None, "float16", None)
    for i in range(length):
        keys.append(page_key(parent, [i, i]))
        parent = keys[-1].digest
    return keys


def _stored(swap: SwapSpace, keys: list[PageKey]) -> None:
    """As the pool throws out a prefix: its end first."""
    for page, key in reversed(list(enumerate(keys, 1))):
        swap.store(page, key)


def test_copies_come_in_the_order_they_must_be_made() -> None:
    copies: list[Copy] = []
    swap, (first, second) = SwapSpace(1, copies), _chain(2)
    swap.store(7, first)
    held = swap.hold([(first, 0)])
    swap.load(held[first, 0], 3)
    swap.put_back(held)
    swap.store(9, second)  # takes the slot that was read before
    assert copies == [Swap(7, (0,), True), Swap(3, (0,), False), Swap(9, (0,), True)]
    assert swap.match([first]) == 0 and swap.match([second]) == 1
    swap.check()


def test_a_prefix_loses_its_end_first_and_what_was_read_stays_longest() -> None:
    swap, keys = SwapSpace(4, []), _chain(6)
    _stored(swap, keys[:4])
    swap.store(9, keys[4])
    assert swap.match(keys) == 3  # the fourth made room
    swap.put_back(swap.hold([(key, 0) for key in keys[:2]]))
    swap.store(8, keys[5])
    assert swap.match(keys) == 2
    swap.check()


def test_what_is_being_read_is_not_overwritten() -> None:
    swap, keys = SwapSpace(2, []), _chain(4)
    _stored(swap, keys[:2])
    held = swap.hold([(key, 0) for key in keys[:2]])
    swap.store(5, keys[2])  # no slot for it
    swap.put_back(held)
    assert swap.match(keys) == 2 and swap.stored == 2
    swap.check()


def test_a_page_that_is_stored_again_while_it_is_read_keeps_one_slot() -> None:
    swap, keys = SwapSpace(3, []), _chain(1)
    swap.store(5, keys[0])
    held = swap.hold([(keys[0], 0)])
    swap.store(6, keys[0])
    swap.put_back(held)
    assert swap.num_used == 1
    swap.check()


def test_slots_whose_copy_is_not_certain_are_forgotten() -> None:
    copies: list[Copy] = []
    swap, keys = SwapSpace(3, copies), _chain(3)
    _stored(swap, keys)
    swap.forget(copies[0].slots)  # of the end
    assert swap.match(keys) == 2
    swap.drop(keys[0].digest)
    assert swap.match(keys) == 0 and swap.num_used == 1
    swap.clear()
    assert swap.num_used == 0
    swap.check()


TIERS = 3
tier = st.integers(0, TIERS - 1)


def _parts(slot: int) -> set[int]:
    """The quarters of slots that a slot is."""
    depth, index = page_tier(slot)
    count = 1 << TIERS - 1 - depth
    return set(range(index * count, (index + 1) * count))


@settings(deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from("sshd"), st.integers(0, 15), tier), max_size=60),
)
def test_slots_of_all_levels_hold_what_was_written_last_and_little_is_lost(
    slots: int, events: list[tuple[str, int, int]]
) -> None:
    """Against memory of quarters: what a slot holds is whose copy touched all of it last."""
    copies: list[Copy] = []
    swap, keys = SwapSpace(slots, copies, TIERS), _chain(16)
    memory: dict[int, tuple[int, int]] = {}  # quarter -> number of the key and its tier
    for event, number, depth in events:
        key, before = keys[number], sum(swap.counts())
        known = swap.match([key], TIERS) > 0
        better = not known or swap.tier(key) > depth
        if event == "s":
            swap.store(page_id(depth, 1), key)
            assert len(copies) == better
            for copy in copies:
                assert page_tier(copy.slots[0])[0] == depth
                memory |= dict.fromkeys(_parts(copy.slots[0]), (number, depth))
            most = 1 << TIERS - 1 - depth
            assert sum(swap.counts()) >= before - known - most + 1
            assert swap.match([key], depth) == 1 and swap.match([key], -1) == 0
        elif event == "h" and known:
            held = swap.hold([(key, 0)])
            depth, _ = page_tier(held[key, 0][0])
            assert {memory[part] for part in _parts(held[key, 0][0])} == {(number, depth)}
            swap.put_back(held)
        elif event == "d":
            swap.drop(key.digest)
        copies.clear()
        swap.check()
    assert swap.num_used <= slots


@settings(deadline=None)
@given(
    st.integers(0, 4),
    st.lists(tier, max_size=8),
    st.lists(st.integers(0, 7), max_size=8),
    st.lists(tier, max_size=8),
)
def test_places_that_fit_can_be_cut_in_any_order(
    count: int, taken: list[int], back: list[int], wanted: list[int]
) -> None:
    slabs, whole = BuddyAllocator(range(1, count + 1), TIERS), range(1, count + 1)
    held = [(one, slabs.allocate(one)) for one in taken if slabs.fits([0] * one + [1])]
    for index in back:
        if held:
            slabs.release(*held.pop(index % len(held)))
    slabs.check(held, whole)
    counts = [wanted.count(one) for one in range(TIERS)]
    fits = slabs.fits(counts)
    assert fits == _can_be_cut(slabs, wanted)
    if fits:
        held += [(one, slabs.allocate(one)) for one in wanted]
    slabs.check(held, whole)


def _can_be_cut(slabs: BuddyAllocator, wanted: list[int]) -> bool:
    """The largest first, each into the first run of free quarters that is one place."""
    places = [(depth, index) for depth, free in enumerate(slabs.free) for index in free]
    free = set[int]().union(*(_parts(page_id(*place)) for place in places))
    for depth in sorted(wanted):
        runs = [_parts(page_id(depth, index)) for index in range(5 << depth)]
        found = next((run for run in runs if run <= free), None)
        if found is None:
            return False
        free -= found
    return True
