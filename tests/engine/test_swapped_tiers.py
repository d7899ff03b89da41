"""Tiered pages with a swap space: moved and swapped out in one plan, and swapped in again.

The runner keeps what every place and every slot holds, and loses what lies in memory that something
else is written to; the answers show whether each copy found what it was to copy.
"""

from __future__ import annotations

import pytest

from sdk.engine.plan import Move, Swap
from sdk.kernels.kv.tiers import page_tier


def prompt(number: int, tokens: int) -> list[int]:
    return [(number * 31 + i) % 900 for i in range(tokens)]


def swapped(rig, **options):
    """Two slabs for a prefix of two pages, and slots for both."""
    return rig(**{"num_pages": 3, "kv_bits": (16, 8, 4), "num_swap_pages": 2, **options})


def ran(r, name: str, *args, **params):
    request = r.add(name, *args, max_tokens=1, **params)
    r.run()
    r.assert_answers()
    return request


def test_a_page_that_goes_down_and_out_in_one_plan_is_read_where_it_is_by_then(rig):
    r = swapped(rig)
    ran(r, "cached", prompt(0, 8))
    ran(r, "other", prompt(1, 8))  # needs both slabs
    copies = [copy for plan in r.runner.plans for copy in plan.copies]
    out = [copy for copy in copies if isinstance(copy, Swap)]
    assert len(out) == 2 and all(copy.out for copy in out)
    for swap in out:
        assert page_tier(swap.page)[0] == page_tier(swap.slots[0])[0] == 2
        before = copies[: copies.index(swap)]
        assert any(isinstance(copy, Move) and copy.target == swap.page for copy in before)
    assert r.scheduler.prefixes.swap.num_used == 1  # two quarters of one slot
    again = ran(r, "again", [*prompt(0, 7), 899])
    assert again.num_cached == 4
    admitted, loaded, _prefill = again.events
    assert (admitted.kind, admitted.num_tokens) == ("admitted", 4)
    assert (loaded.kind, loaded.num_pages, loaded.kv_bits) == ("swapped_in", 1, 4)


def test_a_page_comes_back_in_its_own_type_and_room(rig):
    """Five quarter pages and one of the first type take three slabs."""
    r = rig(num_pages=7, kv_bits=(16, 8, 4), num_swap_pages=8)
    ran(r, "cached", prompt(0, 20))
    ran(r, "other", prompt(1, 24))  # needs all slabs
    swap, tiered = r.scheduler.prefixes.swap, r.scheduler.tiered_pool
    assert swap.counts() == [0, 0, 5] and swap.num_used == 2
    tiered.drop_cached()
    assert swap.counts() == [6, 0, 5] and swap.num_used == 8
    again = r.add("again", [*prompt(0, 20), 899], max_tokens=1)
    r.scheduler.plan()
    assert again.num_cached == 20
    assert [tiered.tier(page) for page in again.pages] == [2] * 5 + [0]
    assert tiered.num_free == 3


@pytest.mark.parametrize(("floor", "cached"), [(None, 4), (4, 4), (8, 0), (16, 0)])
def test_a_slot_below_the_floor_is_a_miss(rig, floor, cached):
    r = swapped(rig)
    ran(r, "cached", prompt(0, 8))
    ran(r, "other", prompt(1, 8))
    assert r.scheduler.prefixes.swap.counts() == [0, 0, 2]
    again = ran(r, "again", [*prompt(0, 7), 899], kv_min_bits=floor)
    assert again.num_cached == cached


def test_the_better_of_two_copies_stays(rig):
    """Computed again for a floor and thrown out as it is, a page takes the place of a coarse one;
    thrown out once more in a lower type it changes nothing."""
    r = swapped(rig, num_swap_pages=4)
    swap = r.scheduler.prefixes.swap
    ran(r, "cached", prompt(0, 8))
    ran(r, "other", prompt(1, 8))
    exact = ran(r, "exact", prompt(0, 9)[:8], kv_min_bits=16)
    assert exact.num_cached == 0
    key = exact.keys[0]
    assert swap.tier(key) == 2
    r.pool.drop_cached()
    assert swap.tier(key) == 0
    stored = swap.stored
    hit = ran(r, "hit", prompt(0, 8), kv_min_bits=16)
    assert hit.num_cached == 4 and swap.loaded == 1
    ran(r, "third", prompt(2, 8))
    assert swap.tier(key) == 0 and swap.stored == stored
    assert r.pool.match([key]) == []
    r.scheduler.check()


def test_a_page_of_a_request_that_came_back_may_go_down_in_the_same_plan(rig):
    r = rig(num_pages=9, kv_bits=(16, 8, 4), num_swap_pages=16, max_num_seqs=3)
    ran(r, "cached", prompt(0, 24))
    r.pool.drop_cached()  # as they are
    assert r.scheduler.prefixes.swap.counts() == [6, 0, 0]
    r.add("again", [*prompt(0, 24), 5], max_tokens=4)
    r.add("other", prompt(1, 14), max_tokens=2)
    r.step()
    copies = r.runner.plans[-1].copies
    back = [copy.page for copy in copies if isinstance(copy, Swap) and not copy.out]
    assert len(back) == 6
    assert {copy.source for copy in copies if isinstance(copy, Move)} & set(back)
    r.run()
    r.assert_answers()


def test_a_host_tier_that_is_full_loses_its_oldest_and_answers_stay(rig):
    r = swapped(rig, num_swap_pages=1)
    for i in range(6):
        ran(r, str(i), prompt(i, 8))
    swap = r.scheduler.prefixes.swap
    assert swap.counts() == [0, 0, 4] and swap.stored == 10
    assert ran(r, "old", [*prompt(0, 7), 899]).num_cached == 0
    assert ran(r, "new", [*prompt(4, 7), 899]).num_cached == 4


def test_preempted_requests_find_their_pages_in_either_tier(rig):
    r = rig(num_pages=9, kv_bits=(16, 8), num_swap_pages=16, max_num_seqs=4)
    for i in range(4):
        r.add(str(i), prompt(i, 8), max_tokens=16)
    r.run()
    r.assert_answers()
    kinds = {event.kind for one in r.requests.values() for event in one.events}
    assert kinds == {"admitted", "prefill", "preempted", "resumed", "swapped_in", "recoded"}


@pytest.mark.parametrize("heard", [False, True])
def test_a_step_that_was_interrupted_leaves_nothing_that_is_not_known(rig, heard):
    """Neither in pages that came back, nor in slots, nor in pages that moved."""
    r = swapped(rig, kv_bits=(16, 8))
    ran(r, "cached", prompt(0, 8))
    ran(r, "other", prompt(1, 8))
    r.add("again", [*prompt(0, 7), 899], max_tokens=1)
    plan = r.scheduler.plan()
    assert {type(copy) for copy in plan.copies} == {Swap, Move}
    assert {copy.out for copy in plan.copies if isinstance(copy, Swap)} == {True, False}
    if heard:
        r.runner.execute(plan)
    r.scheduler.rollback()
    r.scheduler.check()
    written = {copy.slots[0] for copy in plan.copies if isinstance(copy, Swap) and copy.out}
    swap = r.scheduler.prefixes.swap
    assert not written & {slot for _, slot in swap._known.values()}
    r.run()
    for i in (0, 1, 0, 1):
        ran(r, f"later {i} {len(r.requests)}", prompt(i, 8))


@pytest.mark.parametrize("bits", [(16,), (16, 8)])
def test_a_page_whose_way_back_was_interrupted_is_not_known_and_one_that_came_back_is(rig, bits):
    r = swapped(rig, num_pages=9, kv_bits=bits, num_swap_pages=16)
    ran(r, "cached", prompt(0, 8))
    r.pool.drop_cached()
    ran(r, "other", prompt(1, 8))
    again = r.add("again", [*prompt(0, 8), 899], max_tokens=3)
    plan = r.scheduler.plan()
    assert [copy.out for copy in plan.copies] == [False, False]
    r.scheduler.rollback()
    assert r.pool.match(again.keys) == []
    r.step()
    assert r.pool.match(again.keys) != []
    r.scheduler.plan()
    r.scheduler.rollback()
    assert len(r.pool.match(again.keys)) == 2
    r.run()
    r.assert_answers()
    assert r.scheduler.prefixes.swap.loaded == 4


def test_a_page_that_went_down_and_was_given_up_is_nobodys_news(rig):
    """Its id is another page's by then."""
    r = swapped(rig)
    pool = r.pool
    pages = pool.acquire((), 2)
    pool._lowest_tiers = lambda: dict.fromkeys(pages, 1)
    more = pool.acquire((), 1)
    assert r.scheduler.tiered_pool.lowered == 2
    pool.release(pages[:1])
    back = pool.acquire((), 1, tiers=[1])
    assert back == pages[:1]
    assert pool.take_recoded() == {pages[1]: 8}
    pool.check([pages[1:], more, back])
