"""The scheduler against a runner whose tokens depend on every KV value it can see."""

from __future__ import annotations

import pytest
from fake_runner import VOCAB, expected_tokens

from sdk.api.errors import RequestError
from sdk.engine.plan import StepPlan, StepResult
from sdk.engine.scheduling.request import RequestStatus
from sdk.engine.scheduling.scheduler_config import SchedulerConfig


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * 31) % VOCAB for i in range(length)]


def counts(plan: StepPlan) -> dict[str, int]:
    return {row.request_id: row.num_scheduled_tokens for row in plan.rows}


def test_a_request_alone_gives_the_reference_tokens(rig):
    r = rig()
    request = r.add("a", prompt(10), max_tokens=20)
    r.run()
    assert request.output_token_ids == expected_tokens(prompt(10), 20)
    assert request.finish_reason == "length"


def test_a_batch_gives_the_tokens_of_each_request_alone(rig):
    r = rig(max_num_seqs=8)
    for i in range(20):
        r.add(str(i), prompt(3 + i * 2, seed=i), max_tokens=1 + i)
    r.run()
    r.assert_answers()
    assert all(x.finish_reason == "length" for x in r.requests.values())
    assert r.pool.num_available == r.pool.capacity


@pytest.mark.parametrize("budget", [4, 5, 7, 64])
def test_chunked_prefill_gives_the_same_tokens(rig, budget):
    r = rig(max_num_seqs=4, max_num_batched_tokens=budget)
    for i in range(6):
        r.add(str(i), prompt(20 + i, seed=i))
    r.run()
    r.assert_answers()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([40, 40, 40, 40], 20),  # a quarter for each of two stages, and so on
        ([150, 150, 150, 150], 75),
        ([190] * 9, 200),  # as many as a step may have
        ([12], 8),  # a step should not have fewer
    ],
)
def test_stages_share_the_prompts_that_wait(rig, lengths, expected):
    """So that the last stage does not wait for a whole prompt in the first one."""
    r = rig(max_num_seqs=12, num_pages=600, short_step_tokens=8)
    r.scheduler.batches_in_flight, r.scheduler.min_concurrent_tokens = 2, 0
    for i, length in enumerate(lengths):
        r.add(str(i), prompt(length, seed=i))
    assert sum(counts(r.scheduler.plan()).values()) == expected
    r.scheduler.rollback()
    r.scheduler.batches_in_flight = 1
    assert sum(counts(r.scheduler.plan()).values()) == min(sum(lengths), 200)


def test_a_prefix_hit_gives_the_same_tokens(rig):
    r = rig()
    r.add("a", prompt(22))
    r.run()
    hit = r.add("b", prompt(22))
    longer = r.add("c", prompt(22) + r.requests["a"].output_token_ids[:6] + [5, 6])
    r.run()
    r.assert_answers()
    assert hit.num_cached == 20
    assert longer.num_cached == 28  # the output of the first is cached too
    assert r.pool.hits == 5 + 7


def test_a_fully_cached_prompt_leaves_at_least_one_token_to_run(rig):
    r = rig()
    r.add("a", prompt(16))
    r.run()
    again = r.add("b", prompt(16))
    plan, _ = r.step()
    assert again.num_cached == 12 and counts(plan) == {"b": 4}
    one_more = r.add("c", prompt(17))
    plan, _ = r.step()
    assert one_more.num_cached == 16 and counts(plan)["c"] == 1
    r.run()
    r.assert_answers()


def test_preempted_requests_give_the_same_tokens(rig):
    r = rig(num_pages=13, max_model_len=48, max_num_seqs=4)
    for i in range(4):
        r.add(str(i), prompt(6, seed=i), max_tokens=30)
    r.run()
    r.assert_answers()
    assert r.scheduler.queues.num_preemptions > 0
    assert all(len(x.output_token_ids) == 30 for x in r.requests.values())


def test_the_latest_arrival_is_preempted_first(rig):
    r = rig(num_pages=9, max_model_len=32, max_num_seqs=3, enable_prefix_caching=False)
    first, second = (r.add(x, prompt(7, seed=i), max_tokens=24) for i, x in enumerate("ab"))
    r.run()
    assert first.num_preemptions == 0 and second.num_preemptions > 0


def test_the_hit_after_a_preemption_is_looked_up_again_and_the_reported_one_stays(rig):
    r = rig(num_pages=12, max_model_len=44, max_num_seqs=2)
    r.add("warm", prompt(9), max_tokens=1)
    r.run()
    old = r.add("old", prompt(6, seed=2), max_tokens=38)
    victim = r.add("victim", prompt(9), max_tokens=30)
    r.step()
    assert victim.num_cached == 8
    for _ in range(30):
        if not victim.num_preemptions:
            r.step()
    assert victim.status is RequestStatus.PREEMPTED and victim.num_computed == 0
    r.run()
    restarts = [s for p in r.runner.plans for s in p.started if s.request_id == "victim"]
    assert len(restarts) > 1
    assert restarts[-1].num_computed != 8, "its cached pages were evicted meanwhile"
    assert victim.num_cached == 8 and old.num_cached == 0
    r.assert_answers()


def test_a_priority_that_is_smaller_runs_first_and_is_preempted_last(rig):
    r = rig(num_pages=9, max_model_len=32, max_num_seqs=2, policy="priority")
    low = r.add("low", prompt(7, seed=1), priority=5, max_tokens=24)
    r.step()
    high = r.add("high", prompt(7, seed=2), priority=-1, max_tokens=24)
    r.run()
    assert high.num_preemptions == 0 and low.num_preemptions > 0
    r.assert_answers()
    r = rig(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 3), ("b", 1), ("c", 2)):
        r.add(name, prompt(5), priority=priority)
    r.run()
    order = [s.request_id for p in r.runner.plans for s in p.started]
    assert order == ["b", "c", "a"]


def test_fcfs_ignores_priority(rig):
    r = rig(max_num_seqs=1)
    r.add("a", prompt(5), priority=3)
    r.add("b", prompt(5), priority=1)
    r.run()
    assert [s.request_id for p in r.runner.plans for s in p.started] == ["a", "b"]


def test_a_long_prompt_does_not_starve_decodes_nor_they_it(rig):
    r = rig(max_num_seqs=4, max_num_batched_tokens=4, max_model_len=200)
    for name in "abc":
        r.add(name, prompt(1, seed=ord(name)), max_tokens=100)
    r.step()
    r.add("long", prompt(60), max_tokens=2)
    for _ in range(60):
        plan, _ = r.step()
        assert counts(plan) == {"a": 1, "b": 1, "c": 1, "long": 1}
    assert r.requests["long"].num_output_tokens == 1


def test_requests_behind_a_stream_of_new_ones_are_served_in_order(rig):
    r = rig(num_pages=17, max_model_len=64, max_num_seqs=4)
    big = None
    for i in range(60):
        r.add(str(i), prompt(5, seed=i), max_tokens=3)
        if i == 5:
            big = r.add("big", prompt(50, seed=99), max_tokens=3)
        r.step()
    assert big.finished
    r.run()
    r.assert_answers()


def test_without_chunked_prefill_a_prompt_runs_in_one_step(rig):
    r = rig(enable_chunked_prefill=False, max_model_len=40, max_num_batched_tokens=40, num_pages=17)
    for i in range(6):
        r.add(str(i), prompt(25, seed=i), max_tokens=12)
    r.run()
    r.assert_answers()
    for plan in r.runner.plans:
        for start in plan.started:
            assert counts(plan)[start.request_id] == len(start.token_ids) - start.num_computed
    assert r.scheduler.queues.num_preemptions > 0


@pytest.mark.parametrize("most", [0, 1, 5, 9])
def test_a_host_with_little_time_gets_small_steps_that_go_on(rig, most):
    r = rig(max_num_seqs=4, max_num_batched_tokens=32)
    r.add("old", prompt(5))
    r.step()
    r.add("a", prompt(30, seed=2))
    r.add("guided", prompt(9, seed=3), guidance_scale=2.0, negative=prompt(12, seed=4))
    while r.scheduler.queues.num_running or r.scheduler.queues.num_waiting:
        least = r.scheduler.least_tokens
        plan, _ = r.step(most)
        assert r.scheduler.num_tokens == sum(counts(plan).values())
        assert least <= r.scheduler.num_tokens <= max(most, least + 1)
        assert "old" in counts(plan) or r.requests["old"].finished, "answers wait for no prompt"
    r.assert_answers()


def test_without_chunked_prefill_a_host_with_little_time_waits_for_a_whole_prompt(rig):
    r = rig(max_num_batched_tokens=200, enable_chunked_prefill=False)
    r.add("a", prompt(20))
    plan, _ = r.step(1)
    assert counts(plan) == {"a": 20}


def test_requests_with_one_prefix_compute_it_once(rig):
    r = rig(max_num_seqs=8)
    for i in range(5):
        r.add(str(i), [*prompt(40), 7, i])
    plan, _ = r.step()
    assert counts(plan) == {"0": 42}
    plan, _ = r.step()
    assert counts(plan) == {"0": 1, "1": 1, "2": 1, "3": 1, "4": 1}
    r.run()
    r.assert_answers()


@pytest.mark.parametrize("how", ["abort", "error", "reset"])
def test_those_that_wait_for_a_prefix_go_on_when_it_does_not_come(rig, how):
    r = rig(max_num_batched_tokens=32)
    r.add("a", prompt(80))
    r.add("b", prompt(80))
    r.step()
    if how == "abort":
        r.scheduler.queues.abort("a")
    elif how == "error":
        r.runner.errors = {"a": "NaN"}
    else:
        r.scheduler.reset_prefix_cache()
    r.run()
    assert r.requests["b"].num_output_tokens == 8
    r.assert_answers()


def test_salts_adapters_and_kv_types_keep_prefixes_apart(rig):
    r = rig()
    r.add("a", prompt(20), salt="x")
    r.run()
    other, same = r.add("b", prompt(20), salt="y"), r.add("c", prompt(20), salt="x")
    plain = r.add("d", prompt(20))
    r.run()
    assert (other.num_cached, same.num_cached, plain.num_cached) == (0, 16, 0)


def test_a_page_is_known_only_after_its_step_was_committed(rig):
    r = rig()
    request = r.add("a", prompt(16))
    plan = r.scheduler.plan()
    assert r.pool.match(request.keys) == []
    result = r.runner.execute(plan)
    assert r.pool.match(request.keys) == []
    r.scheduler.commit(result)
    assert len(r.pool.match(request.keys)) == 4


def test_a_failed_step_of_a_request_publishes_nothing_and_forgets_what_it_had(rig):
    r = rig(max_num_batched_tokens=40)
    request = r.add("a", prompt(60))
    other = r.add("b", prompt(10, seed=2))
    r.step()
    r.runner.errors = {"a": "logits are NaN"}
    r.step()
    assert request.finish_reason == "error" and request.stop_reason == "logits are NaN"
    assert r.pool.match(request.keys) == []
    r.run()
    assert other.finish_reason == "length"
    r.assert_answers()


@pytest.mark.parametrize("when", ["waiting", "mid-prefill", "running", "in flight", "preempted"])
def test_an_abort_gives_pages_back_at_once_and_reaches_the_ranks(rig, when):
    r = rig(max_num_batched_tokens=32, num_pages=17, max_model_len=60)
    request = r.add("a", prompt(40), max_tokens=20)
    if when == "waiting":
        r.scheduler.queues.abort("a")
        plan = r.scheduler.plan()
        assert not plan.rows and not plan.dropped
        return
    plan = r.scheduler.plan()
    if when == "in flight":
        r.scheduler.queues.abort("a")
        assert r.pool.num_available == r.pool.capacity
        again = r.add("a", prompt(12, seed=3))  # the id is free again, even now
        assert r.scheduler.commit(r.runner.execute(plan)) == []
        next_plan, _ = r.step()
        assert next_plan.dropped == ("a",) and next_plan.started[0].token_ids == (*prompt(12, 3),)
        r.run()
        assert again.num_output_tokens == 8
        r.assert_answers()
        return
    r.scheduler.commit(r.runner.execute(plan))
    if when == "running":
        r.step()
        r.step()
    if when == "preempted":
        r.scheduler.plan()
        r.scheduler.rollback()
        assert request.status is RequestStatus.PREEMPTED
    r.scheduler.queues.abort("a")
    r.scheduler.check()
    assert request.finish_reason == "abort" and not request.pages
    assert r.pool.num_available == r.pool.capacity
    assert r.scheduler.plan().dropped[-1] == "a"
    assert r.scheduler.queues.abort("a") is None


def test_eos_and_stop_tokens_end_a_request_with_the_right_reason(rig):
    tokens = expected_tokens(prompt(6), 8)
    assert len(set(tokens)) == 8
    r = rig(eos_token_ids=frozenset({tokens[3]}))
    eos = r.add("eos", prompt(6))
    both = r.add("both", prompt(6), stop_token_ids=[tokens[3]])
    stop = r.add("stop", prompt(6), stop_token_ids=[tokens[1]])
    ignore = r.add("ignore", prompt(6), ignore_eos=True)
    late = r.add("late", prompt(6), stop_token_ids=[tokens[1], tokens[5]], min_tokens=5)
    r.run()
    assert [x.num_output_tokens for x in (eos, both, stop, ignore, late)] == [4, 4, 2, 8, 6]
    assert [x.finish_reason for x in (eos, stop, ignore)] == ["stop", "stop", "length"]
    assert (eos.stop_reason, both.stop_reason, stop.stop_reason) == (None, None, tokens[1])
    assert late.stop_reason == tokens[5]


def test_the_end_of_the_context_and_of_the_pool_end_with_length(rig):
    r = rig(max_model_len=20)
    request = r.add("a", prompt(10), max_tokens=None)
    r.run()
    assert request.num_tokens == 20 and request.finish_reason == "length"
    r = rig(num_pages=4, max_model_len=100)
    request = r.add("a", prompt(10), max_tokens=None)
    r.run()
    assert request.num_tokens == 13 and request.finish_reason == "length"
    r.assert_answers()


def test_a_deadline_ends_with_what_there_is(rig):
    r = rig(max_num_seqs=1)
    running = r.add("a", prompt(5), deadline=10.0, max_tokens=100)
    waiting = r.add("b", prompt(5), deadline=5.0)
    for _ in range(3):
        r.step()
    r.now = 7.0
    _, updates = r.step()
    assert waiting.finish_reason == "deadline" and updates[0].request is waiting
    r.now = 10.0
    plan, updates = r.step()
    assert plan.dropped == ("a",) and running.finish_reason == "deadline"
    assert [u.request for u in updates] == [running] and running.num_output_tokens == 4
    assert r.pool.num_available == r.pool.capacity
    r.assert_answers()


def test_finished_requests_do_not_stay_because_of_their_deadline(rig):
    r = rig()
    for i in range(300):
        r.add(str(i), prompt(3), deadline=1e6, max_tokens=1)
        r.run()
    assert len(r.scheduler.queues._deadlines) < 100


def test_prompt_logprobs_score_every_position_once(rig):
    r = rig(max_num_batched_tokens=32, num_pages=33, max_model_len=100)
    r.add("warm", prompt(70))
    r.run()
    r.updates.clear()
    request = r.add("a", prompt(70), prompt_logprobs=0)
    r.step()
    r.scheduler.plan()
    r.scheduler.rollback()  # preempted in the middle of its prompt
    r.run()
    scored = [s.token_id for u in r.updates if u.request is request for s in u.prompt_logprobs]
    assert scored == prompt(70)[1:] and request.num_cached == 0
    r.assert_answers()


def test_an_embedding_finishes_with_its_prompt_and_sees_every_position(rig):
    r = rig(max_num_batched_tokens=32)
    r.add("warm", prompt(70))
    r.run()
    r.updates.clear()
    request = r.add("e", prompt(70), kind="embed")
    r.run()
    assert [u.request for u in r.updates] == [request] and len(r.updates[0].hidden) == 70
    assert request.finish_reason == "stop" and request.num_cached == 0


def test_a_rank_that_returns_nothing_fails_the_request(rig):
    r = rig()
    generate, embed = r.add("g", prompt(5)), r.add("e", prompt(6, 2), kind="embed")
    plan = r.scheduler.plan()
    r.scheduler.commit(StepResult(plan.step_id))
    assert generate.stop_reason == "the step returned no token"
    assert embed.stop_reason == "the step returned no embedding"
    r.scheduler.check()


def test_what_can_never_run_is_refused_while_others_wait(rig):
    r = rig(num_pages=5, max_model_len=30, max_num_seqs=1)
    r.add("a", prompt(10))
    r.add("b", prompt(10))
    with pytest.raises(RequestError, match="needs 5 KV pages of 4 tokens; 4 are available"):
        r.add("c", prompt(17))
    with pytest.raises(RequestError, match="30 tokens; max_model_len is 30, and"):
        r.add("d", prompt(30))
    with pytest.raises(RequestError, match=r"31 tokens; max_model_len is 30$"):
        r.add("e", prompt(31), kind="embed")
    with pytest.raises(RequestError, match="prompt is empty"):
        r.add("f", [])
    with pytest.raises(RequestError, match="'b' is already in use"):
        r.add("b", prompt(3))
    r.run()
    assert [x.num_output_tokens for x in r.requests.values()] == [7, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1"),
        ({"policy": "lifo"}, "policy must be one of .'fcfs', 'priority', 'fair'., got 'lifo'"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "must be at least max_num_seqs"),
        ({"enable_chunked_prefill": False, "max_model_len": 4096}, "without chunked prefill"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(num_pages=10, **options)


def test_plan_and_commit_must_alternate(rig):
    r = rig()
    r.add("a", prompt(5))
    plan = r.scheduler.plan()
    with pytest.raises(RuntimeError, match="planned but not committed"):
        r.scheduler.plan()
    with pytest.raises(RuntimeError, match="result of step 7; expected 1"):
        r.scheduler.commit(StepResult(7))
    r.scheduler.commit(r.runner.execute(plan))
    with pytest.raises(RuntimeError, match="none is in flight"):
        r.scheduler.commit(StepResult(plan.step_id))


def test_a_rolled_back_step_is_done_again(rig):
    r = rig()
    r.add("a", prompt(10))
    r.add("gone", prompt(4))
    r.step()
    r.scheduler.queues.abort("gone")
    plan = r.scheduler.plan()
    r.runner.execute(plan)  # the ranks did it, but nobody heard
    r.scheduler.rollback()
    r.scheduler.check()
    plan, _ = r.step()
    assert set(plan.dropped) == {"gone", "a"}
    r.run()
    r.assert_answers()


def test_a_running_request_publishes_nothing_after_a_reset(rig):
    r = rig()
    r.add("a", prompt(10), max_tokens=20)
    r.step()
    r.scheduler.reset_prefix_cache()
    r.run()
    assert r.pool.num_cached == 0
    again = r.add("b", prompt(10))
    r.run()
    assert again.num_cached == 0


@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_of_exactly_all_seats_at_full_length_seats_everybody_at_once(
    rig, page_size, caching
):
    r = rig(
        num_pages=1 + 4 * 32 // page_size,
        page_size=page_size,
        max_model_len=32,
        max_num_seqs=4,
        enable_prefix_caching=caching,
    )
    for i in range(12):
        r.add(str(i), prompt((1, 16, 30, 31)[i % 4], seed=i), max_tokens=None)
    while r.scheduler.queues.num_waiting:
        plan = r.scheduler.plan()
        assert r.scheduler.queues.num_running == 4
        r.scheduler.commit(r.runner.execute(plan))
    r.run()
    r.assert_answers()
    assert r.scheduler.queues.num_preemptions == 0


def test_a_page_is_kept_for_those_that_will_need_one_and_for_no_others(rig):
    options = {"num_pages": 5, "page_size": 4, "max_model_len": 16, "max_num_seqs": 4}
    r = rig(**options)
    r.add("grows", prompt(4, 1), max_tokens=5)  # its fourth answer token is stored in a second page
    r.add("waits", prompt(16, 2)[:13], max_tokens=1)
    r.step()
    assert r.scheduler.queues.num_running == 1, "4 + 1 pages of 4 would be needed"
    r = rig(**options)
    r.add("fits", prompt(4, 1), max_tokens=1)
    r.add("answers", prompt(3, 3), max_tokens=2)  # the last token's KV is never stored
    r.add("embedding", prompt(4, 4), kind="embed", max_tokens=9)
    r.add("last", prompt(4, 5), max_tokens=1)
    plan, _ = r.step()
    assert len(plan.started) == 4
    r.run()
    r.assert_answers()
    assert r.scheduler.queues.num_preemptions == 0


def test_while_requests_stay_the_plan_is_the_same_object_but_for_new_pages(rig):
    r = rig(page_size=4)
    r.add("a", prompt(5), max_tokens=40)
    r.add("b", prompt(6, seed=2), max_tokens=40)
    r.step()
    r.step()
    plans = [r.step()[0] for _ in range(28)]
    bare = [plan for plan in plans if not plan.new_pages]
    assert len(bare) == 14 and len({id(plan) for plan in bare}) == 1
    assert not any(bare[0][2:])
    grown = [plan for plan in plans if plan.new_pages]
    assert all(len(plan.new_pages) == 1 for plan in grown)
    assert not any(plan.started or plan.dropped for plan in grown)
    assert len({id(plan.rows) for plan in plans}) == 1
    r.run()
    r.assert_answers()


def test_requests_that_stay_are_planned_anew_when_somebody_may_join(rig):
    r = rig(max_num_seqs=2)
    for name, count in (("a", 30), ("b", 10), ("c", 8)):
        r.add(name, prompt(5, seed=ord(name)), max_tokens=count)
    r.step()
    r.step()
    last, _ = r.step()
    for _ in range(2):  # one waits, but there is no seat
        plan, _ = r.step()
        assert r.scheduler.queues.num_waiting == 1 and plan.rows is last.rows
    while r.scheduler.queues.num_waiting:
        plan, _ = r.step()
    assert [start.request_id for start in plan.started] == ["c"] and plan.dropped == ("b",)
    r.run()
    r.assert_answers()


def test_a_request_that_is_aborted_while_a_step_runs_again_takes_no_token_from_it(rig):
    r = rig()
    for name in "ab":
        r.add(name, prompt(5, seed=ord(name)), max_tokens=20)
    for _ in range(4):
        r.step()
    plan = r.scheduler.plan()
    assert r.scheduler.repeats
    gone = r.scheduler.queues.abort("a")
    known = gone.num_tokens
    r.scheduler.commit(r.runner.execute(plan))
    assert gone.num_tokens == known and not r.scheduler.repeats
    assert r.step()[0].dropped == ("a",)
    r.run()
    r.assert_answers()
