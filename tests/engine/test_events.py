"""What a request's outputs tell of what happened to it while memory was short."""

from __future__ import annotations

from sdk.api.outputs import RequestEvent
from sdk.api.params import SamplingParams
from sdk.engine.answers import Answer, JobAnswers
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec


def prompt(number: int, tokens: int) -> list[int]:
    return [(number * 31 + i) % 900 for i in range(tokens)]


def memory_events(request) -> list[RequestEvent]:
    return [event for event in request.events if event.kind not in ("admitted", "prefill")]


def kinds(request) -> list[str]:
    return [event.kind for event in memory_events(request)]


def advance(r) -> None:
    """Steps a second apart until nothing is left."""
    while r.scheduler.queues.num_running + r.scheduler.queues.num_waiting:
        r.step()
        r.now += 1.0
    r.assert_answers()


def test_a_request_to_which_nothing_happens_is_admitted_and_computed(rig):
    r = rig()
    request = r.add("a", prompt(0, 16))
    advance(r)
    assert request.events == (
        RequestEvent(0.0, "admitted"),
        RequestEvent(0.0, "prefill", num_tokens=16),
    )


def test_a_preempted_request_tells_when_at_which_token_and_what_it_found_again(rig):
    r = rig(num_pages=9, max_model_len=32, max_num_seqs=3, enable_prefix_caching=False)
    first, second = (r.add(name, prompt(i, 7), max_tokens=24) for i, name in enumerate("ab"))
    advance(r)
    assert kinds(first) == []
    assert second.num_preemptions == kinds(second).count("preempted") > 0
    assert kinds(second) == ["preempted", "resumed"] * second.num_preemptions
    lost, again = memory_events(second)[:2]
    assert 7 < lost.num_tokens < 31
    assert second.scheduled_ts < lost.ts < again.ts < second.last_token_ts
    assert again.num_tokens == 0  # nothing is cached, so all of it ran anew


def test_pages_that_come_back_from_the_swap_space_are_told(rig):
    r = rig(num_pages=9, num_swap_pages=16, max_model_len=32)
    r.add("warm", prompt(0, 17), max_tokens=1)
    advance(r)
    r.add("other", prompt(1, 28), max_tokens=1)
    advance(r)
    again = r.add("again", prompt(0, 17), max_tokens=1)
    advance(r)
    (event,) = memory_events(again)
    assert event.kind == "swapped_in" and event.num_pages > 0
    assert event.ts == again.scheduled_ts
    assert r.scheduler.prefixes.swap.loaded == event.num_pages


def test_pages_that_move_to_a_lower_tier_are_told_to_those_who_hold_them(rig):
    r = rig(num_pages=20, kv_bits=(16, 8, 4), enable_prefix_caching=False)
    exact = r.add("exact", prompt(0, 24), max_tokens=16, kv_min_bits=16)
    others = [r.add(str(i), prompt(i, 24), max_tokens=16) for i in (1, 2)]
    advance(r)
    assert r.scheduler.queues.num_preemptions == 0
    assert kinds(exact) == []
    events = [event for request in others for event in memory_events(request)]
    assert {event.kind for event in events} == {"recoded"}
    assert {event.kv_bits for event in events} <= {8, 4}
    assert sum(event.num_pages for event in events) == r.scheduler.tiered_pool.lowered > 0


def test_several_answers_tell_their_events_in_the_order_of_time(rig):
    r = rig(num_pages=9, max_model_len=32, max_num_seqs=3, enable_prefix_caching=False)
    params = SamplingParams(n=3, max_tokens=24)
    answers = JobAnswers(Job(SequenceSpec("g", params), tuple(prompt(0, 7))))
    for index in range(3):
        request = r.add(str(index), prompt(index, 7), max_tokens=24)
        answers.each.append(Answer(index, request, None, None, lambda token: None))
    advance(r)
    events = answers.metrics().events
    assert len(events) == sum(len(one.request.events) for one in answers.each) > 2
    assert [event.ts for event in events] == sorted(event.ts for event in events)
