"""Frames of window groups, slots of states, and the byte budget that they share with pages."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sdk.api.errors import RequestError
from sdk.engine.pages.budget import Budget
from sdk.engine.pages.frames import FramePool, Held, WindowGroup
from sdk.engine.pages.page_pool import PagePool
from sdk.engine.pages.states import StatePool, StateSlots
from sdk.engine.scheduling.scheduler_config import SchedulerConfig

PAGE = 16
WINDOW = {"windows": (WindowGroup(64, 40, 300),), "page_bytes": 100}


def text(length: int, first: int = 3) -> list[int]:
    return [(first * 7919 + 31 * i + i * i) % 900 for i in range(length)]


@pytest.mark.parametrize("chunk", [32, 256])
def test_a_long_prompt_holds_the_window_and_a_chunk(rig: Any, chunk: int) -> None:
    r = rig(
        num_pages=300,
        page_size=PAGE,
        max_model_len=4000,
        max_num_batched_tokens=chunk,
        **WINDOW,
    )
    request, most = r.add("a", text(3000), max_tokens=100), 0
    while r.scheduler.queues.unfinished:
        r.step()
        most = max([most, *(len(held.frames) for held in request.windows)])
    assert 4 <= most <= (64 + chunk) // PAGE + 2
    r.assert_answers()


def test_chunks_shrink_where_frames_are_few(rig: Any) -> None:
    """Seven frames: a window of 64 tokens, and at least two tokens more."""
    few = {"windows": (WindowGroup(64, 40, 7 + 1),), "page_bytes": 100}
    r = rig(num_pages=300, page_size=PAGE, max_model_len=4000, **few)
    r.add("a", text(500), max_tokens=40)
    plan, _ = r.step()
    assert [row.num_scheduled_tokens for row in plan.rows] == [7 * PAGE]
    r.run()
    r.assert_answers()


def test_a_request_for_which_the_memory_is_too_small_is_rejected(rig: Any) -> None:
    few = {"windows": (WindowGroup(64, 40, 6),), "page_bytes": 100}  # a window takes six
    r = rig(num_pages=300, page_size=PAGE, max_model_len=4000, **few)
    assert r.add("short", text(40)).max_len == 48
    with pytest.raises(RequestError, match="needs 7 KV pages of 16 tokens; 5 are available"):
        r.add("long", text(100))


def test_a_page_that_two_requests_share_keeps_its_frame_for_both(rig: Any) -> None:
    r = rig(num_pages=300, page_size=PAGE, max_model_len=2000, **WINDOW)
    first = r.add("a", text(100), max_tokens=300)
    for _ in range(31):
        r.step()
    second = r.add("b", [*text(100), 5], max_tokens=60)
    r.step()
    pool = r.scheduler.groups.frames[0]
    both = set(first.windows[0].frames) & set(second.windows[0].frames)
    assert both and all(pool._holders[frame] == 2 for frame in both)
    for _ in range(40):  # the first one's window leaves them
        r.step()
    left = both & set(second.windows[0].frames)
    assert left and left.isdisjoint(first.windows[0].frames)
    assert all(pool._holders[frame] == 1 for frame in left)
    r.run()
    assert all(pool._holders[frame] == 0 for frame in both)
    r.assert_answers()


def test_steady_decoding_repeats_one_plan_between_pages(rig: Any) -> None:
    r = rig(num_pages=300, page_size=PAGE, max_model_len=2000, **WINDOW)
    for name in "ab":
        r.add(name, text(32), max_tokens=200)
    plans = [r.step()[0] for _ in range(60)]
    new = [plan for plan in plans[3:] if plan.new_pages]
    assert all(len(plan.new_frames) == len(plan.new_pages) for plan in new) and len(new) == 6
    assert len({id(plan) for plan in plans[3:]}) <= 2 + len(new)
    r.run()
    r.assert_answers()


def test_memory_moves_to_the_kind_that_needs_it(rig: Any) -> None:
    """Enough for the pages of a long request, or for the slots of many short ones."""
    options = {"states": StateSlots(300, 50), "page_bytes": 100, "cache_bytes": 4000}
    r = rig(num_pages=41, page_size=PAGE, max_model_len=600, max_num_seqs=8, **options)
    budget, pool = r.scheduler.groups.budget, r.scheduler.pool
    assert pool.capacity == 40
    for turn in range(3):
        r.add(f"long {turn}", text(500, turn), max_tokens=30)
        r.run()
        assert pool.capacity >= 33
        for number in range(8):
            r.add(f"{turn} {number}", text(10, 10 * turn + number), max_tokens=5)
        r.step()
        assert r.scheduler.queues.num_running == 8
        assert budget.granted <= 4000
        r.run()
    r.assert_answers()


def test_a_smaller_cache_stays_smaller(rig: Any) -> None:
    options = {"states": StateSlots(300, 50), "page_bytes": 100, "cache_bytes": 4000}
    r = rig(num_pages=41, page_size=PAGE, max_model_len=300, **options)
    r.scheduler.resize(30)
    r.add("a", text(100), max_tokens=50)
    r.run()
    assert r.scheduler.groups.budget.granted <= 3000
    r.scheduler.check()


def test_a_budget_takes_what_nobody_uses_first_and_is_all_or_nothing() -> None:
    pool = PagePool(11, PAGE, limit=11)
    pool.unit_bytes = 10
    frames = FramePool(WindowGroup(16, 25, 20), PAGE, 11)
    budget = Budget(100, [pool, frames], [0.5, 0.5])
    assert budget.missing([0, 4]) == 0 and budget.missing([0, 5]) == 25
    assert budget.missing([1, 4]) == 10 and budget.missing([11, 0]) == 10
    assert not budget.obtain([1, 4]) and pool.capacity == 10
    assert budget.obtain([2, 3]) and frames.num_spare >= 3 and pool.num_spare >= 2
    assert budget.granted <= 100
    held = Held(2)
    frames.claim(held)
    assert frames.num_spare == frames.capacity - 2
    frames.release(held)
    assert budget.obtain([8, 0]), "the frames give back what they took"
    lost, also = budget.take_vacated()
    assert sorted(lost) == sorted(pool._withheld) and also
    assert set(also) <= set(frames._withheld), "never had any, or lost it"
    assert budget.take_vacated() == [[], []]
    budget.check()


def test_a_budget_that_shrinks_keeps_what_has_owners() -> None:
    pool = PagePool(11, PAGE, limit=11)
    pool.unit_bytes = 10
    frames = FramePool(WindowGroup(16, 25, 20), PAGE, 11)
    budget = Budget(200, [pool, frames], [0.5, 0.5])
    assert budget.obtain([3, 2])
    held, pages = Held(0), pool.acquire((), 3)
    frames.grow(held, 2)
    assert pages is not None
    assert budget.shrink(60) == 60 and budget.nbytes == 140
    assert budget.shrink(1000) == 60 and budget.nbytes == 80, "three pages and two frames"
    assert (pool.capacity, frames.capacity) == (3, 2)
    budget.grow(10)
    assert budget.obtain([1, 0])
    pool.release(pages)
    frames.release(held)
    assert budget.shrink(90) == 90 and budget.granted == 0
    budget.check()


def test_fixed_regions_lend_nothing() -> None:
    pool = PagePool(11, PAGE)
    frames = FramePool(WindowGroup(16, 25, 4), PAGE, 11)
    budget = Budget(None, [pool, frames], [0.5, 0.5])
    assert frames.capacity == 3
    assert budget.obtain([10, 3]) and not budget.obtain([0, 4]) and budget.missing([0, 5]) == 50
    assert budget.shrink(10) == 0 and pool.capacity == 10
    budget.grow(10)
    assert budget.nbytes is None


def test_the_snapshot_that_saves_least_is_evicted_and_its_tokens_count_for_the_next() -> None:
    states = StatePool(StateSlots(100, 5))
    states.give(4)
    slots = states.take(4)
    first = states.attach(1, slots[0], 1000, None)
    second = states.attach(2, slots[1], 1100, first)
    third = states.attach(3, slots[2], 1500, second)
    assert (first.cost, second.cost, third.cost) == (1000, 100, 400)
    assert states.take_for_snapshot(50) == 0, "all others save more"
    assert states.take_for_snapshot(200) == slots[1] and third.cost == 500
    states.hold(first)
    assert states.take(1) == [slots[2]] and states.of(3) is None
    states.detach(1)
    states.drop(first)
    assert states.take(1) == [slots[0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**WINDOW, "kv_bits": (16, 8)}, "do not work with tiers"),
        ({**WINDOW, "num_swap_pages": 3}, "swap_parts: expected 2 positive numbers, got (1,)"),
        ({**WINDOW, "page_bytes": -1}, "page_bytes must not be negative, got -1"),
        ({"windows": (WindowGroup(0, 1, 9),)}, "windows: every number must be positive"),
        ({"states": StateSlots(1, 1)}, "states: every number must be positive"),
        ({"states": StateSlots(1, 9, 0, 0, 4)}, "states: every number must be positive"),
    ],
)
def test_descriptions_without_sense_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SchedulerConfig(num_pages=10, **options)
