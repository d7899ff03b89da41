"""Pages that move to lower tiers before any is evicted."""

from __future__ import annotations

import pytest

from sdk.api.errors import RequestError


def pages(r) -> dict[int, int]:
    """In the cache, by their bits."""
    return dict(zip(r.scheduler.tiered_pool.bits, r.scheduler.tiered_pool._counts, strict=True))


def prompt(number: int, tokens: int) -> list[int]:
    return [(number * 31 + i) % 900 for i in range(tokens)]


def test_requests_that_need_more_pages_than_there_are_run_together(rig):
    """35 pages for 4 requests of 16: 1.8 times as many."""
    r = rig(num_pages=36, kv_bits=(16, 8, 4))
    for i in range(4):
        r.add(str(i), prompt(i, 60), max_tokens=5)
    running = 0
    while r.scheduler.queues.num_running + r.scheduler.queues.num_waiting:
        r.step()
        running = max(running, r.scheduler.queues.num_running)
    r.assert_answers()
    assert running == 4
    assert r.scheduler.queues.num_preemptions == 0
    assert r.scheduler.tiered_pool.lowered > 0


def test_without_need_no_page_goes_down(rig):
    r = rig(num_pages=17, kv_bits=(16, 8, 4), enable_prefix_caching=False)
    for i in range(4):
        r.add(str(i), prompt(i, 12), max_tokens=4)
    r.run()
    assert r.scheduler.tiered_pool.lowered == 0
    assert not any(plan.copies for plan in r.runner.plans)


def test_cached_pages_go_down_before_those_of_requests_and_before_any_is_evicted(rig):
    r = rig(num_pages=9, kv_bits=(16, 8, 4))
    r.add("cached", prompt(0, 16), max_tokens=1)
    r.run()
    r.add("first", prompt(1, 16), max_tokens=3)
    r.step()
    r.step()  # which needs a ninth page
    assert pages(r) == {16: 7, 8: 2, 4: 0}
    assert r.scheduler.tiered_pool.lowered == 2
    assert r.pool.num_cached == 4 and r.pool.evictions == 0
    r.run()
    r.assert_answers()


def test_a_floor_keeps_the_pages_of_its_request(rig):
    r = rig(num_pages=11, kv_bits=(16, 8, 4), enable_prefix_caching=False)
    r.add("exact", prompt(0, 16), max_tokens=12, kv_min_bits=16)
    r.add("half", prompt(1, 16), max_tokens=12, kv_min_bits=8)
    r.add("any", prompt(2, 16), max_tokens=12)
    r.run()  # the runner checks the floors
    r.assert_answers()
    assert r.scheduler.tiered_pool.lowered > 0


@pytest.mark.parametrize(
    ("keep", "coarse"), [((1, 0), {1, 2, 3, 4, 5}), ((2, 1), {2, 3, 4}), ((0, 3), {0, 1, 2})]
)
def test_pages_to_keep_at_both_ends_of_a_request_stay_in_the_first_type(rig, keep, coarse):
    """Six full pages and one being written: all that may go down must, for the other request."""
    r = rig(num_pages=10, kv_bits=(16, 8), kv_keep=keep, enable_prefix_caching=False)
    one = r.add("one", prompt(0, 25), max_tokens=3)
    r.step()
    free = r.scheduler.tiered_pool.num_available
    r.add("other", prompt(1, 4 * free - 1), max_tokens=1)
    r.step()
    tiers = [r.scheduler.tiered_pool.tier(page) for page in one.pages]
    assert free == 9 - 7 + len(coarse) // 2
    assert {i for i, tier in enumerate(tiers) if tier} <= coarse
    assert sum(tiers) >= len(coarse) // 2 * 2
    r.run()
    r.assert_answers()


def test_a_prefix_below_the_floor_is_a_miss_and_the_better_copy_is_known_from_then_on(rig):
    r = rig(num_pages=9, kv_bits=(16, 8), max_num_seqs=2)
    r.add("cached", prompt(0, 17), max_tokens=1)
    r.run()
    r.add("other", prompt(1, 24), max_tokens=1)
    r.run()
    assert pages(r)[8] > 0
    exact = r.add("exact", prompt(0, 17), max_tokens=1, kv_min_bits=16)
    r.run()
    again = r.add("again", prompt(0, 17), max_tokens=1, kv_min_bits=16)
    r.run()
    r.assert_answers()
    assert exact.num_cached < 16
    assert again.num_cached == 16


def test_half_empty_slabs_become_full_ones_without_loss(rig):
    """Every second of the lowered pages is given back: what is left moves together."""
    r = rig(num_pages=9, kv_bits=(16, 8), enable_prefix_caching=False, max_num_seqs=8)
    pool, tiered = r.pool, r.scheduler.tiered_pool
    pages = pool.acquire((), 8)
    tiered._lowest_tiers = lambda: dict.fromkeys(pages, 1)
    more = pool.acquire((), 4)
    assert tiered.lowered == 8 and pool.num_free == 0
    tiered._lowest_tiers = dict
    pool.release(pages[::2])
    assert pool.num_available == 2
    before = tiered.lowered
    rest = pool.acquire((), 2)
    assert tiered.lowered == before and len(rest) == 2
    pool.check([pages[1::2], more, rest])


def test_a_step_that_was_interrupted_leaves_no_page_whose_content_is_unknown(rig):
    r = rig(num_pages=9, kv_bits=(16, 8, 4))
    r.add("cached", prompt(0, 16), max_tokens=1)
    r.run()
    r.add("next", prompt(1, 28), max_tokens=2)
    assert r.scheduler.plan().copies
    r.scheduler.rollback()  # the ranks never heard of the plan
    r.scheduler.check()
    r.add("again", prompt(0, 16), max_tokens=2)
    r.run()
    r.assert_answers()


@pytest.mark.parametrize(("bits", "found"), [((8, 4), 8), ((4,), 4)])
def test_a_floor_above_the_first_type_is_refused(rig, bits, found):
    r = rig(kv_bits=bits, kv_type="such")
    with pytest.raises(RequestError, match=rf"kv_min_bits=16: the KV cache has {found} bits"):
        r.add("0", [1, 2, 3], kv_min_bits=16)


def test_pages_are_withheld_and_granted_in_whole_pages_of_the_first_type(rig):
    r = rig(num_pages=9, first_pages=7, kv_bits=(16, 8))
    pool = r.pool
    assert (pool.capacity, pool.num_withheld) == (6, 2)
    r.add("cached", prompt(0, 16), max_tokens=1)
    r.run()
    assert len(pool.withhold(8)) == 6 and pool.num_cached == 0
    r.scheduler.check()
    assert pool.grant(20) == 8
    assert sorted(pool.drop_cached()) == list(range(1, 9))
    r.add("whole", prompt(1, 30), max_tokens=2)
    r.run()
    r.assert_answers()
