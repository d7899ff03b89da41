"""How many tokens run again although their prefix was computed before: models with windows or
recurrent states, in the patterns that make prefix caches of other engines miss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fake_runner import ScriptedDrafter

from sdk.engine.scheduling.drafts import Drafts
from sdk.engine.scheduling.scheduler_config import StateSlots, WindowGroup

pytestmark = pytest.mark.quick_cases(2)

PAGE = 16
#: A state of half a page (a short convolution), one of 160 pages (a delta net), with snapshots in
#: 16 bits, windows, both.
KINDS = {
    "convolution": {"states": StateSlots(50, 400)},
    "delta net": {"states": StateSlots(16_000, 60)},
    "rounded": {"states": StateSlots(16_000, 30, 0, 8_000, 60)},
    "window": {"windows": (WindowGroup(40, 80, 400), WindowGroup(100, 30, 400))},
    "window and delta net": {
        "windows": (WindowGroup(40, 80, 400),),
        "states": StateSlots(16_000, 60),
    },
}


@pytest.fixture(params=list(KINDS))
def make(request: Any, rig: Any) -> Callable[..., Any]:
    """Builds a Rig of one kind, with pages of 16 tokens."""
    return lambda **options: rig(
        **{
            "page_size": PAGE,
            "num_pages": 400,
            "max_model_len": 2000,
            "page_bytes": 100,
            "max_num_seqs": 8,
            **KINDS[request.param],
            **options,
        }
    )


def text(length: int, first: int = 3) -> list[int]:
    """Tokens that differ for each ``first``."""
    return [(first * 7919 + 31 * i + i * i) % 900 for i in range(length)]


def repeated(r: Any, action: Callable[[], Any]) -> int:
    """The tokens that run again in an action."""
    before = r.runner.num_repeated
    action()
    return r.runner.num_repeated - before


def answer(r: Any, name: str, prompt: list[int], **params: Any) -> Any:
    request = r.add(name, prompt, **{"max_tokens": 30, **params})
    r.run()
    return request


@pytest.mark.parametrize("chunk", [2000, 48])
def test_no_turn_of_a_conversation_computes_what_came_before(make: Any, chunk: int) -> None:
    r, conversation = make(max_num_batched_tokens=chunk), text(100)
    for turn in range(6):
        request = r.add(str(turn), conversation, max_tokens=37)
        assert repeated(r, r.run) == 0
        assert request.num_cached == (len(conversation) - 21 if turn else 0)
        conversation = [*request.token_ids, *text(20, 50 + turn)]
    r.assert_answers()


def test_an_answer_that_is_generated_again_computes_at_most_a_page(make: Any) -> None:
    r = make()
    for length in (5, 100, 160, 161):  # a short one, and the last page full or not
        prompt = text(length, length)
        answer(r, f"{length}", prompt)
        for again in range(2):
            # its answer is the same, and runs again
            run = repeated(r, lambda: answer(r, f"{length} {again}", prompt, max_tokens=1))  # noqa: B023
            assert run <= PAGE
    r.assert_answers()


def test_an_edited_last_message_computes_only_itself(make: Any) -> None:
    r = make()
    first = answer(r, "first", text(100))
    history = list(first.token_ids)
    answer(r, "second", [*history, *text(50, 8)])
    for edit in range(3):
        prompt = [*history, *text(30, 9 + edit)]
        # the last token of an answer runs in the next turn
        assert repeated(r, lambda: answer(r, f"edit {edit}", prompt)) == 1  # noqa: B023
    r.assert_answers()


def test_an_edit_in_the_middle_of_a_message_costs_the_message_once(make: Any) -> None:
    """A branch point: the second request that leaves the prompt there leaves a snapshot."""
    r = make()
    answer(r, "first", text(400))
    costs = []
    for edit in range(3):
        prompt = [*text(201), *text(30, 90 + edit)]
        costs.append(repeated(r, lambda: answer(r, f"edit {edit}", prompt)))  # noqa: B023
    assert costs[0] <= 201 and max(costs[1:]) <= PAGE
    r.assert_answers()


@pytest.mark.parametrize("chunk", [2000, 48])
def test_users_who_come_together_compute_their_system_prompt_once(make: Any, chunk: int) -> None:
    r, system = make(max_num_batched_tokens=chunk), text(330)
    for user in range(8):
        r.add(str(user), [*system, *text(40, 60 + user)], max_tokens=20)
    assert repeated(r, r.run) <= 7 * PAGE
    r.assert_answers()


def test_users_who_come_one_by_one_compute_their_system_prompt_twice_at_most(make: Any) -> None:
    r, system = make(), text(330)
    costs = []
    for user in range(6):
        prompt = [*system, *text(40, 60 + user)]
        costs.append(repeated(r, lambda: answer(r, str(user), prompt)))  # noqa: B023
    assert costs[0] == 0 and costs[1] <= len(system) and max(costs[2:]) <= PAGE
    r.assert_answers()


def test_agents_that_branch_from_one_context_compute_one_token_each(make: Any) -> None:
    r = make()
    context = list(answer(r, "context", text(300)).token_ids)
    for agent in range(5):
        r.add(f"agent {agent}", [*context, *text(20, 70 + agent)], max_tokens=25)
    assert repeated(r, r.run) == 4  # the last token of the context runs in each
    r.assert_answers()


@pytest.mark.parametrize("length", [291, 292])  # the context ends in a page, and with one
def test_four_levels_of_branches_compute_one_token_for_each_branch(make: Any, length: int) -> None:
    r = make()
    leaves = [list(answer(r, "root", text(length)).token_ids)]
    for level in range(4):
        names = [f"{level} {leaf} {branch}" for leaf in range(len(leaves)) for branch in range(2)]
        costs = []
        for index, name in enumerate(names):
            prompt = [*leaves[index // 2], *text(20, 500 + 40 * level + index)]
            costs.append(repeated(r, lambda: answer(r, name, prompt, max_tokens=29)))  # noqa: B023
        # the last token of an answer runs in each branch, which for one of the two is not again
        assert costs == [0, 1] * len(leaves)
        leaves = [list(r.requests[name].token_ids) for name in names][:4]
    r.assert_answers()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("cut", [201, 208, 209])  # in a page, and at its end
def test_branches_off_the_middle_of_a_context_compute_it_once(
    make: Any, cut: int, together: bool
) -> None:
    """No state was saved there: the first branch runs the context again, and saves it for the
    others, also for those that came at the same time."""
    r = make()
    context = list(answer(r, "context", text(300)).token_ids)
    costs = []
    for branch in range(4):
        r.add(f"{branch}", [*context[:cut], *text(20, 70 + branch)], max_tokens=25)
        if not together:
            costs.append(repeated(r, r.run))
    if together:
        assert repeated(r, r.run) <= cut + 3 * PAGE
    else:
        assert costs[0] <= cut and max(costs[1:]) <= PAGE
    r.assert_answers()


@pytest.mark.parametrize("slots", [24, 28])
def test_new_answers_are_continued_though_old_conversations_fill_the_memory(
    rig: Any, slots: int
) -> None:
    """The end of an answer saves little more than a page, counted from the state before it, and the
    prompts of older conversations save more: the end is what the next request needs."""
    r = rig(
        page_size=PAGE,
        num_pages=400,
        max_model_len=2000,
        page_bytes=100,
        states=StateSlots(16_000, slots),
    )
    for old in range(8):
        answer(r, f"old {old}", text(140, 100 + old))
    branches = [list(answer(r, "root", text(128), max_tokens=24).token_ids)] * 3
    for step in range(3):
        costs = []
        for number, branch in enumerate(branches):
            prompt, name = [*branch, *text(16, 300 + 10 * step + number)], f"{step} {number}"
            costs.append(repeated(r, lambda: answer(r, name, prompt, max_tokens=24)))  # noqa: B023
        assert costs == ([0, 1, 1] if not step else [0, 0, 0])
        branches = [list(r.requests[f"{step} {number}"].token_ids) for number in range(3)]
    assert r.scheduler.groups.states.evictions
    r.assert_answers()


def test_a_text_without_the_end_of_an_answer_computes_at_most_two_pages(make: Any) -> None:
    """A stop string was cut off: the end of the turn is not what the next request begins with."""
    r = make()
    first = answer(r, "first", text(100), max_tokens=60)
    prompt = [*first.token_ids[:-4], *text(20, 7)]
    assert repeated(r, lambda: answer(r, "second", prompt)) <= 2 * PAGE
    r.assert_answers()


def test_requests_that_are_preempted_compute_at_most_a_page(make: Any) -> None:
    r = make(num_pages=40)
    for number in range(4):
        r.add(str(number), text(100, number), max_tokens=150)
    cost = repeated(r, r.run)
    preempted = r.scheduler.queues.num_preemptions
    assert preempted
    # the pages of the one that goes may be needed by the others
    assert cost <= preempted * 250
    r.assert_answers()


def test_one_that_is_preempted_and_finds_its_pages_computes_nothing_twice(make: Any) -> None:
    r = make()
    r.add("a", text(100), max_tokens=60)
    for _ in range(23):
        r.step()
    r.scheduler.queues.preempt_last()
    allowed = PAGE if r.scheduler.groups.states is None else 0
    assert repeated(r, r.run) <= allowed
    r.assert_answers()


@pytest.mark.parametrize("reason", ["abort", "deadline", "stop"])
def test_an_answer_that_was_stopped_can_be_continued(make: Any, reason: str) -> None:
    r = make()
    first = r.add("a", text(100), max_tokens=200)
    for _ in range(60):
        r.step()
    r.scheduler.queues.finish("a", reason)
    allowed = 0 if r.scheduler.groups.states is not None or reason == "stop" else PAGE
    assert repeated(r, lambda: answer(r, "b", [*first.token_ids, 7, 8])) <= allowed
    del r.requests["a"]
    r.assert_answers()


def test_drafts_leave_the_state_of_the_last_accepted_token(make: Any) -> None:
    states = make().config.states
    r = make(states=None if states is None else states._replace(drafts=3))
    r.scheduler.drafts = Drafts(ScriptedDrafter(), 3)
    conversation = text(50)
    for turn in range(8):
        request = r.add(str(turn), conversation, max_tokens=20 + turn)
        r.run()
        assert request.num_accepted_tokens
        assert request.num_cached == (len(conversation) - 6 if turn else 0)
        conversation = [*request.token_ids, *text(5, 40 + turn)]
    r.assert_answers()


def test_a_pinned_prefix_stays_when_everything_else_goes(make: Any) -> None:
    from sdk.engine.pages.prefix_store import PrefixStore
    from sdk.quant.spec import KVSpec

    r, system = make(num_pages=60), text(160)
    spec = KVSpec(num_layers=1, kv_heads=1, head_dim=8, page_size=PAGE)
    kept = PrefixStore(r.scheduler, r.runner, spec)
    assert kept.pin(system, None) is None
    answer(r, "system", system, max_tokens=1)
    assert kept.pin(system, None) == 160
    for other in range(12):
        answer(r, f"other {other}", text(400, 100 + other))
    request = answer(r, "user", [*system, *text(30, 9)])
    assert request.num_cached == 160
    assert kept.unpin(system, None)
    r.scheduler.check()
    r.assert_answers()
