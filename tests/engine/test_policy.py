"""Policies: who starts first, who gives up a place, and what each tenant gets."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from fake_runner import VOCAB

from sdk import FairPolicy, PriorityPolicy, SchedulingPolicy
from sdk.api.errors import RequestError
from sdk.api.scheduling_policy import make_policy


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * 31) % VOCAB for i in range(length)]


def started(plan) -> list[str]:
    return [start.request_id for start in plan.started]


def tokens_of(r) -> Counter:
    """Prompt tokens and tokens of answers that ran so far, by tenant."""
    counts: Counter = Counter()
    for request in r.requests.values():
        counts[request.tenant] += max(request.num_computed, request.num_reported)
    return counts


# Priorities


def test_a_better_priority_takes_the_slot_of_a_running_request_which_goes_on_later(rig):
    r = rig(max_num_seqs=2, policy="priority")
    low = [r.add(f"low{i}", prompt(9, seed=i), priority=5, max_tokens=60) for i in range(2)]
    for _ in range(20):
        r.step()
    high = r.add("high", prompt(9, seed=7), priority=1, max_tokens=4)
    plan, _ = r.step()
    assert started(plan) == ["high"] and plan.dropped == ("low1",)
    assert low[1].num_preemptions == 1 and low[0].num_preemptions == 0
    r.run()
    r.assert_answers()
    assert high.last_token_ts <= low[1].last_token_ts
    again = [s for p in r.runner.plans for s in p.started if s.request_id == "low1"][-1]
    assert again.num_computed == 28, "its full pages were still in the cache"


def test_a_better_priority_takes_pages_too(rig):
    r = rig(num_pages=17, max_model_len=64, max_num_seqs=8, policy="priority")
    low = r.add("low", prompt(30), priority=5, max_tokens=30)
    for _ in range(20):
        r.step()
    high = r.add("high", prompt(40, seed=2), priority=1, max_tokens=4)
    plan, _ = r.step()
    assert started(plan) == ["high"] and low.num_preemptions == 1
    r.run()
    r.assert_answers()
    assert high.num_preemptions == 0


def test_nothing_is_preempted_if_that_would_not_be_enough(rig):
    r = rig(num_pages=25, max_model_len=64, max_num_seqs=8, policy="priority")
    first = r.add("first", prompt(30), priority=0, max_tokens=30)
    low = r.add("low", prompt(8, seed=3), priority=5, max_tokens=20)
    for _ in range(18):
        r.step()
    r.add("high", prompt(50, seed=2), priority=1, max_tokens=4)
    r.step()
    assert not first.num_preemptions and not low.num_preemptions
    r.run()
    r.assert_answers()


def test_a_request_runs_a_page_at_least_before_it_is_preempted(rig):
    r = rig(max_num_seqs=1, policy="priority", max_num_batched_tokens=4)
    low = r.add("low", prompt(3), priority=5, max_tokens=60)
    r.step()
    r.add("high", prompt(3, seed=2), priority=1, max_tokens=2)
    while not low.num_preemptions:
        r.step()
    assert 17 <= low.num_tokens <= 17 + 8, "of repeated steps one of eight looks"
    r.run()
    r.assert_answers()


@pytest.mark.parametrize("aging", [10.0, math.inf])
def test_waiting_ages_so_that_a_late_request_of_a_better_priority_comes_after(rig, aging):
    r = rig(max_num_seqs=1, policy="priority", priority_aging=aging)
    r.add("runs", prompt(5), priority=-9, max_tokens=3)
    r.step()
    r.add("old", prompt(5, seed=1), priority=3)
    r.now = 15.0
    r.add("soon", prompt(5, seed=2), priority=1)
    r.now = 25.0
    r.add("late", prompt(5, seed=3), priority=1)
    r.run()
    order = [name for plan in r.runner.plans for name in started(plan)][1:]
    assert order == (["soon", "old", "late"] if aging < 99 else ["soon", "late", "old"])


def test_an_aged_request_is_not_preempted_by_a_better_priority(rig):
    r = rig(max_num_seqs=1, policy="priority", priority_aging=10.0)
    low = r.add("low", prompt(5), priority=2, max_tokens=60)
    for _ in range(30):
        r.step()
    r.now = 100.0
    r.add("high", prompt(5, seed=2), priority=1)
    for _ in range(10):
        r.step()
    assert low.num_preemptions == 0


def test_an_interactive_prompt_goes_before_a_long_one_in_progress(rig):
    r = rig(
        num_pages=200,
        max_model_len=700,
        max_num_seqs=4,
        max_num_batched_tokens=20,
        policy="priority",
    )
    r.add("batch", prompt(600), priority=5)
    for _ in range(3):
        r.step()
    chat = r.add("chat", prompt(18, seed=2), priority=0)
    plan, _ = r.step()
    assert {row.request_id: row.num_scheduled_tokens for row in plan.rows} == {"chat": 18}
    assert chat.first_token_ts is not None
    r.run()
    r.assert_answers()


def test_overtaken_requests_decode_in_every_other_step_of_an_urgent_prompt(rig):
    r = rig(max_num_seqs=4, max_num_batched_tokens=8, num_pages=200, policy="priority")
    for i in range(2):
        r.add(f"low{i}", prompt(4, i), priority=5, max_tokens=60)
    r.add("peer", prompt(4, 5), priority=0, max_tokens=60)
    for _ in range(6):
        r.step()
    r.add("chat", prompt(40, seed=2), priority=0, max_tokens=2)
    rows = [{row.request_id for row in r.step()[0].rows} for _ in range(6)]
    both = {"low0", "low1"}
    assert [both <= names for names in rows] == [True, False, True, False, True, False]
    assert all({"peer", "chat"} <= names for names in rows)
    r.run()
    r.assert_answers()


def test_steps_stay_short_while_requests_come_that_overtake(rig):
    options = {"num_pages": 400, "max_model_len": 900, "max_num_batched_tokens": 200}
    r = rig(**options, max_num_seqs=4, policy="priority", short_step_tokens=16)
    r.add("batch", prompt(800), priority=5, max_tokens=1)
    assert sum(row.num_scheduled_tokens for row in r.step()[0].rows) == 200
    r.add("chat", prompt(8, seed=2), priority=0, max_tokens=1)
    assert {row.request_id for row in r.step()[0].rows} == {"chat"}
    assert sum(row.num_scheduled_tokens for row in r.step()[0].rows) == 16
    r.now += 61.0
    assert sum(row.num_scheduled_tokens for row in r.step()[0].rows) == 200


# Tenants


def serve(r, tenants, steps: int, *, lengths=(12, 20), waiting: int = 3) -> None:
    """Every tenant always has some requests waiting. A step takes a second."""
    for _ in range(steps):
        alive = Counter(x.tenant for x in r.scheduler.queues.unfinished.values())
        for tenant in tenants:
            for _ in range(waiting + 8 - alive[tenant]):
                count = len(r.requests)
                r.add(
                    f"{tenant}{count}",
                    prompt(lengths[0], count),
                    tenant=tenant,
                    max_tokens=lengths[1],
                )
        r.now += 1.0
        r.step()


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize(
    "weights", [{"a": 1, "b": 1}, {"a": 4, "b": 1}, {"a": 1, "b": 2.5, "c": 1.5}]
)
def test_tokens_are_shared_by_weight(rig, slots, weights):
    r = rig(max_num_seqs=slots, policy="fair", tenant_weights=weights)
    serve(r, weights, 1500 // slots + 150)
    counts, total = tokens_of(r), sum(weights.values())
    for tenant, weight in weights.items():
        share = counts[tenant] / sum(counts.values())
        assert share == pytest.approx(weight / total, rel=0.05), (tenant, counts)
    r.assert_answers()


def test_a_weight_can_change_while_requests_run(rig):
    r = rig(max_num_seqs=4, policy="fair")
    serve(r, "ab", 400)
    before = tokens_of(r)
    assert before["a"] == pytest.approx(before["b"], rel=0.05)
    r.scheduler.queues.policy.set_weight("a", 3)
    serve(r, "ab", 600)
    after = tokens_of(r)
    assert after["a"] - before["a"] == pytest.approx(3 * (after["b"] - before["b"]), rel=0.05)


def test_different_lengths_share_what_tokens_cost(rig):
    """Tokens of answers cost twice as much as those of prompts."""
    r = rig(max_num_seqs=4, policy="fair", num_pages=200)
    for _ in range(900):
        alive = Counter(x.tenant for x in r.scheduler.queues.unfinished.values())
        for tenant, num, answer in (("reads", 100, 2), ("writes", 4, 40)):
            if alive[tenant] < 6:
                count = len(r.requests)
                r.add(f"{count}", prompt(num, count), tenant=tenant, max_tokens=answer)
        r.step()
    cost = Counter()
    for x in r.requests.values():
        done = max(x.num_computed, x.num_reported)
        cost[x.tenant] += min(done, x.num_prompt_tokens)
        cost[x.tenant] += 2 * max(done - x.num_prompt_tokens, 0)
    assert cost["reads"] == pytest.approx(cost["writes"], rel=0.05)


def test_a_tenant_that_comes_back_has_saved_nothing_up(rig):
    r = rig(max_num_seqs=4, policy="fair")
    serve(r, "ab", 50)
    while any(not x.finished for x in r.requests.values() if x.tenant == "b"):
        r.step()
    serve(r, "a", 400)
    before = tokens_of(r)
    serve(r, "ab", 400)
    after = tokens_of(r)
    assert after["a"] - before["a"] == pytest.approx(after["b"] - before["b"], rel=0.07)


def first_tokens(rig, *, batch: bool) -> tuple[list[float], Counter]:
    """Sorted seconds to the first token of 60 chats, with or without a saturating batch.

    A step takes 3.4 ms and 0.35 ms for each token: SmolLM2 135M on two cores, with a quarter of
    the lengths, slots and tokens of a step that an engine has.
    """
    r = rig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        short_step_tokens=16,
        policy="fair",
        tenant_weights={"chat": 4},
        num_pages=150,
    )
    chats = []
    for step in range(800):
        alive = Counter(x.tenant for x in r.scheduler.queues.unfinished.values())
        for _ in range(12 - alive["batch"] if batch else 0):
            count = len(r.requests)
            r.add(f"{count}", prompt(30 + count % 60, count), tenant="batch", max_tokens=25)
        if step % 13 == 5:
            chat = r.add(f"chat{step}", prompt(75, step), tenant="chat", max_tokens=8)
            begin = r.now - 0.0034 * (step % 3) / 2  # it came while the last step ran
            chats.append((chat, begin))
        plan = r.scheduler.plan()
        r.now += 0.0034 + 0.00035 * sum(row.num_scheduled_tokens for row in plan.rows)
        r.scheduler.commit(r.runner.execute(plan))
    r.run()
    r.assert_answers()
    assert batch == (r.scheduler.queues.num_preemptions > 0)
    return sorted(chat.first_token_ts - begin for chat, begin in chats), tokens_of(r)


def test_an_interactive_tenant_waits_little_longer_beside_a_saturating_batch(rig):
    alone, _ = first_tokens(rig, batch=False)
    beside, _ = first_tokens(rig, batch=True)
    assert beside[int(0.99 * len(beside))] <= 1.5 * alone[int(0.99 * len(alone))]
    assert beside[len(beside) // 2] <= 1.5 * alone[len(alone) // 2]


def test_two_tenants_never_take_a_slot_from_each_other_in_turn(rig):
    r = rig(max_num_seqs=5, policy="fair", num_pages=200)
    for i in range(12):
        r.add(f"a{i}", prompt(6, i), tenant="a", max_tokens=100)
    for _ in range(30):
        r.step()
    for i in range(12):
        r.add(f"b{i}", prompt(6, 50 + i), tenant="b", max_tokens=100)
    for _ in range(60):
        r.step()
    assert r.scheduler.queues.num_preemptions == 2, "two or three slots each, of five"
    r.run()
    r.assert_answers()


def test_within_a_tenant_priority_decides_then_arrival(rig):
    r = rig(max_num_seqs=1, policy="fair")
    r.add("runs", prompt(5), tenant="a", max_tokens=2)
    r.step()
    for i, priority in enumerate((3, 1, 2, 1)):
        r.add(f"{priority}-{i}", prompt(5, i), tenant="a", priority=priority)
    r.run()
    order = [name for plan in r.runner.plans for name in started(plan)][1:]
    assert order == ["1-1", "1-3", "2-2", "3-0"]


def test_counters_of_tenants_that_are_gone_do_not_pile_up(rig):
    r = rig(policy="fair")
    for i in range(300):
        r.add(str(i), prompt(2, i), tenant=f"t{i}", max_tokens=1)
        r.run()
    assert len(r.scheduler.queues.policy._used) <= 66


def test_repeated_steps_are_still_the_same_object(rig):
    """While nobody waits, and under fcfs also while others do, a step costs what it did."""
    r = rig(policy="fair", max_num_seqs=2, page_size=64, num_pages=9)
    for i in range(2):
        r.add(str(i), prompt(4, i), tenant=str(i), max_tokens=60)
    for _ in range(4):
        r.step()
    plans = [r.step()[0] for _ in range(20)]
    assert all(plan is plans[0] for plan in plans)
    r.add("waits", prompt(4, 9), tenant="0")
    looked = [r.step()[0] for _ in range(20)]
    assert 2 <= len(set(map(id, looked))) <= 7


# Policies of users


class Shortest(SchedulingPolicy):
    """The shortest prompt first."""

    def order(self, request):
        return request.num_prompt_tokens


class Turns(SchedulingPolicy):
    """Each tenant in turn: the one that started a request last is the last."""

    dynamic = True

    def __init__(self):
        self.calls = Counter()
        self.turn = {}

    def queue(self, request):
        return request.tenant

    def position(self, queue):
        return (self.turn.get(queue, 0),)

    def started(self, request):
        self.turn[request.tenant] = max(self.turn.values(), default=0) + 1

    def added(self, request):
        self.calls["added"] += 1

    def stopped(self, request):
        self.calls["stopped"] += 1

    def ended(self, request):
        self.calls["ended"] += 1

    def ran(self, request, prompt_tokens, answer_tokens):
        self.calls["prompt"] += prompt_tokens
        self.calls["answer"] += answer_tokens


def test_a_policy_of_ones_own_decides_the_order(rig):
    r = rig(max_num_seqs=1, policy=Shortest())
    for i, length in enumerate((9, 3, 30, 5)):
        r.add(str(length), prompt(length, i), max_tokens=2)
    r.run()
    assert [name for plan in r.runner.plans for name in started(plan)] == ["3", "5", "9", "30"]


def test_a_policy_is_told_of_everything_once(rig):
    policy = Turns()
    r = rig(max_num_seqs=2, policy=policy, num_pages=12, max_model_len=40)
    for i in range(6):
        r.add(f"{'ab'[i // 3]}{i}", prompt(6, i), tenant="ab"[i // 3], max_tokens=30)
    r.run()
    names = [name for plan in r.runner.plans for name in started(plan)]
    first = list(dict.fromkeys(names))
    assert [name[0] for name in first] == ["a", "b"] * 3
    assert policy.calls["added"] == policy.calls["ended"] == 6
    assert policy.calls["stopped"] == 6 + r.scheduler.queues.num_preemptions
    # the last token of an answer is never read back, and a preemption counts nothing twice
    assert policy.calls["prompt"] == 36 and policy.calls["answer"] == 6 * 29
    r.assert_answers()


@pytest.mark.parametrize("weight", [0, -1, math.nan, math.inf, "4", None, True, 1e7])
def test_a_bad_weight_is_refused_by_name(weight):
    with pytest.raises(RequestError, match="weight of tenant 'a': expected a number from 0"):
        FairPolicy({"a": weight})
    policy = FairPolicy()
    with pytest.raises(RequestError, match="weight of tenant"):
        policy.set_weight(None, weight)
    assert policy.weight(None) == policy.weight("unknown") == 1


@pytest.mark.parametrize("tenant", ["", 3, b"a"])
def test_a_bad_tenant_is_refused(tenant):
    with pytest.raises(RequestError, match="tenant: expected a name or None"):
        FairPolicy().set_weight(tenant, 1)


@pytest.mark.parametrize("aging", [0, -1, math.nan, "60", True])
def test_a_bad_rate_of_aging_is_refused(aging):
    with pytest.raises(RequestError, match="priority_aging: expected seconds above 0, or inf"):
        PriorityPolicy(aging)


def test_names_make_their_policies_and_objects_are_taken_as_they_are():
    own = Shortest()
    assert make_policy(own) is own
    assert type(make_policy("fcfs")) is SchedulingPolicy
    assert isinstance(make_policy("priority"), PriorityPolicy)
    assert make_policy("fair", {"a": 4}).weight("a") == 4
