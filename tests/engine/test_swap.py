"""The books of the swap space: slots, their order, and copies in the order they are made."""

from __future__ import annotations

from sdk.engine.pages import PageKey, page_key, root_digest
from sdk.engine.plan import Swap
from sdk.engine.swap import SwapSpace


def _chain(length: int) -> list[PageKey]:
    """The keys of one prefix of so many pages of two tokens."""
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
    swap, (first, second) = SwapSpace(1), _chain(2)
    swap.store(7, first)
    held = swap.hold([first])
    swap.load(held[first], 3)
    swap.put_back(held)
    swap.store(9, second)  # takes the slot that was read before
    assert swap.take_swaps() == (Swap(7, 0, True), Swap(3, 0, False), Swap(9, 0, True))
    assert swap.take_swaps() == ()
    assert swap.match([first]) == 0 and swap.match([second]) == 1
    swap.check()


def test_a_prefix_loses_its_end_first_and_what_was_read_stays_longest() -> None:
    swap, keys = SwapSpace(4), _chain(6)
    _stored(swap, keys[:4])
    swap.store(9, keys[4])
    assert swap.match(keys) == 3  # the fourth made room
    swap.put_back(swap.hold(keys[:2]))
    swap.store(8, keys[5])
    assert swap.match(keys) == 2
    swap.check()


def test_what_is_being_read_is_not_overwritten() -> None:
    swap, keys = SwapSpace(2), _chain(4)
    _stored(swap, keys[:2])
    held = swap.hold(keys[:2])
    swap.store(5, keys[2])  # no slot for it
    swap.put_back(held)
    assert swap.match(keys) == 2 and swap.stored == 2
    swap.check()


def test_a_page_that_is_stored_again_while_it_is_read_keeps_one_slot() -> None:
    swap, keys = SwapSpace(3), _chain(1)
    swap.store(5, keys[0])
    held = swap.hold(keys)
    swap.store(6, keys[0])
    swap.put_back(held)
    assert swap.num_used == 1
    swap.check()


def test_slots_whose_copy_is_not_certain_are_forgotten() -> None:
    swap, keys = SwapSpace(3), _chain(3)
    _stored(swap, keys)
    swaps = swap.take_swaps()
    swap.forget([swaps[0].slot])  # of the end
    assert swap.match(keys) == 2
    swap.drop(keys[0].digest)
    assert swap.match(keys) == 0 and swap.num_used == 1
    swap.clear()
    assert swap.num_used == 0
    swap.check()
