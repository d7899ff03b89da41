"""Frames and recurrent states in the swap space: what was evicted comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sdk.engine.pages.prefixes import Prefixes
from sdk.engine.plan import Swap
from sdk.engine.scheduling.scheduler_config import StateSlots, WindowGroup

pytestmark = pytest.mark.quick_cases(2)

PAGE = 16
KINDS: dict[str, dict[str, Any]] = {
    "state": {"states": StateSlots(900, 60), "swap_parts": (2, 3)},
    "rounded": {"states": StateSlots(900, 30, 0, 450, 60), "swap_parts": (2, 3)},
    "window": {"windows": (WindowGroup(40, 80, 80),), "swap_parts": (1, 2)},
    "windows and state": {
        "windows": (WindowGroup(40, 80, 80), WindowGroup(100, 30, 80)),
        "states": StateSlots(900, 60),
        "swap_parts": (2, 1, 2, 5),
    },
}


@pytest.fixture(params=list(KINDS))
def make(request: Any, rig: Any) -> Callable[..., Any]:
    """Builds a Rig of one kind with memory for 30 pages and what they need besides."""
    return lambda **options: rig(
        **{
            "page_size": PAGE,
            "num_pages": 60,
            "max_model_len": 400,
            "max_num_batched_tokens": 400,
            "max_num_seqs": 4,
            "page_bytes": 100,
            "cache_bytes": 12_000,
            "num_swap_pages": 900,
            **KINDS[request.param],
            **options,
        }
    )


def text(length: int, first: int) -> list[int]:
    return [(first * 7919 + 31 * i + i * i) % 900 for i in range(length)]


def repeated(r: Any, name: str, prompt: list[int], max_tokens: int = 20) -> int:
    """The tokens that run again for one request."""
    before = r.runner.num_repeated
    r.add(name, prompt, max_tokens=max_tokens)
    r.run()
    return r.runner.num_repeated - before


def fill(r: Any, count: int = 8) -> None:
    """Other requests take all of the memory."""
    for other in range(count):
        repeated(r, f"other {len(r.requests)}", text(150, 100 + len(r.requests) + other))


def loads(r: Any) -> set[int]:
    """The regions of what came back from the swap space."""
    return {
        one.region
        for plan in r.runner.plans
        for one in plan.copies
        if isinstance(one, Swap) and not one.out
    }


def test_a_conversation_goes_on_after_others_took_all_of_its_memory(make: Any) -> None:
    r, conversation = make(), text(100, 3)
    for turn in range(4):
        run, request = repeated(r, str(turn), conversation, 20 + turn), r.requests[str(turn)]
        if turn:  # without states the last page is not swapped if it is not full
            known = len(conversation) - 11
            rest = 0 if r.scheduler.prefixes.has_states else known % PAGE
            assert (run, request.num_cached) == (rest, known - rest)
        conversation = [*request.token_ids, *text(10, 50 + turn)]
        fill(r)
    assert loads(r) == set(range(len(r.config.swap_parts)))
    r.assert_answers()


def test_without_swap_space_the_same_conversation_runs_again(make: Any) -> None:
    r, conversation = make(num_swap_pages=0), text(100, 3)
    repeated(r, "first", conversation)
    fill(r)
    assert repeated(r, "second", [*r.requests["first"].token_ids, *text(10, 50)]) > 100


def test_branches_go_on_from_one_state_that_was_swapped_out(make: Any) -> None:
    r = make()
    repeated(r, "root", text(100, 4))
    context = list(r.requests["root"].token_ids)
    fill(r)
    before = r.runner.num_repeated
    for branch in range(3):
        r.add(f"branch {branch}", [*context, *text(20, 60 + branch)], max_tokens=20)
    r.run()
    # the last token of the context runs in each; without states the page that has it does
    rest = len(context) % PAGE if not r.scheduler.prefixes.has_states else 1
    assert r.runner.num_repeated - before <= 3 * rest
    r.assert_answers()


def test_requests_that_are_preempted_come_back_where_they_were(make: Any) -> None:
    r = make(num_pages=35)
    for number in range(4):
        r.add(str(number), text(60, number), max_tokens=150)
    before = r.runner.num_repeated
    r.run()
    preempted = r.scheduler.queues.num_preemptions
    assert preempted
    allowed = 0 if r.scheduler.prefixes.has_states else PAGE
    assert r.runner.num_repeated - before <= preempted * allowed
    r.assert_answers()


def test_a_request_whose_state_was_being_loaded_starts_over_after_a_failure(make: Any) -> None:
    """The step with the copies fails: nothing that they would have written may be found."""
    r = make()
    repeated(r, "first", text(100, 5))
    fill(r)
    r.add("second", [*r.requests["first"].token_ids, *text(10, 51)], max_tokens=20)
    plan = r.scheduler.plan()
    assert any(isinstance(one, Swap) and not one.out for one in plan.copies)
    r.scheduler.rollback()
    r.scheduler.check()
    r.run()
    r.assert_answers()


def test_a_state_that_does_not_fit_into_the_swap_space_pushes_nothing_out(make: Any) -> None:
    r = make(num_swap_pages=2)
    fill(r)
    found = [one for plan in r.runner.plans for one in plan.copies if isinstance(one, Swap)]
    assert {len(one.slots) for one in found} <= {1, 2}
    r.assert_answers()


def test_a_page_with_nan_takes_its_frames_and_states_with_it(make: Any) -> None:
    r = make()
    repeated(r, "first", text(100, 6))
    prefixes: Prefixes = r.scheduler.prefixes
    key = r.requests["first"].keys[0]
    fill(r)
    assert prefixes.swap.has(key)
    prefixes.swap.drop(key.digest)
    assert not any(prefixes.swap.has(key, region) for region in range(len(r.config.swap_parts)))
    r.scheduler.check()
