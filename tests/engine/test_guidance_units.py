"""A request with a negative prompt is two sequences and one unit: slots, budget, pages, errors."""

from __future__ import annotations

import pytest

from sdk.api.errors import RequestError

GUIDED = {"guidance_scale": 1.5, "negative": [7, 8, 9]}


def test_a_negative_prompt_takes_a_second_slot_and_a_token_of_each_step(rig):
    r = rig(max_num_seqs=3)
    for name in "abc":
        r.add(name, [1, 2, 3, 4, ord(name)], **GUIDED)
    r.step()
    assert r.scheduler.queues.num_running == 1
    plan, _ = r.step()
    assert {row.request_id: row.num_scheduled_tokens for row in plan.rows} == {
        "a": 1,
        "a~negative": 1,
    }
    r.run()
    r.assert_answers()


def test_the_last_tokens_of_both_run_together_however_small_the_budget(rig):
    r = rig(max_num_seqs=2, max_num_batched_tokens=2)
    r.add("a", list(range(9)), **GUIDED)
    plans = [
        {row.request_id: row.num_scheduled_tokens for row in r.step()[0].rows} for _ in range(7)
    ]
    assert plans[4:] == [{"a~negative": 2}, {"a": 1, "a~negative": 1}, {"a": 1, "a~negative": 1}]
    r.run()
    r.assert_answers()


@pytest.mark.parametrize("requests", [1, 3])
def test_stages_of_a_pipeline_take_a_token_of_both_however_short_steps_are(rig, requests):
    r = rig(max_num_seqs=4, max_num_batched_tokens=15, short_step_tokens=1)
    scheduler = r.scheduler
    scheduler.batches_in_flight, scheduler.min_concurrent_tokens = 2, 0
    for name in "abc"[:requests]:
        r.add(name, [1, 2, ord(name)], **GUIDED)
    r.run()
    r.assert_answers()


def test_both_are_preempted_and_come_back_together(rig):
    r = rig(num_pages=11, max_num_seqs=4)
    for name in "ab":
        r.add(name, [1, 2, 3, 4, 5, ord(name)], max_tokens=12, **GUIDED)
    r.run()
    assert r.scheduler.queues.num_preemptions > 0
    dropped = [plan.dropped for plan in r.runner.plans if plan.dropped]
    assert all(f"{name}~negative" in names for names in dropped for name in names if len(name) == 1)
    r.assert_answers()


@pytest.mark.parametrize("how", ["abort", "stop", "error"])
def test_an_end_releases_the_pages_of_both(rig, how):
    r = rig()
    r.add("a", list(range(9)), **GUIDED)
    r.step()
    if how == "error":
        r.runner.errors = {"a": "NaN"}
        r.step()
    else:
        r.scheduler.queues.finish("a", how)
    assert r.pool.num_available == r.pool.capacity
    plan, _ = r.step()
    assert plan.dropped == ("a", "a~negative") and not r.runner.requests


def test_without_a_negative_prompt_the_last_token_is_the_negative_prompt(rig):
    r = rig()
    request = r.add("a", [5, 6, 7], guidance_scale=2)
    assert request.negative.token_ids == [7]
    assert r.add("plain", [5, 6, 7]).negative is None


@pytest.mark.parametrize(
    ("options", "negative", "message"),
    [
        ({"max_num_seqs": 1}, [1], "takes two slots, and max_num_seqs is 1"),
        ({"enable_chunked_prefill": False}, [1], "needs enable_chunked_prefill"),
        ({}, [], "negative prompt is empty"),
        ({}, [1] * 200, "negative prompt has 200 tokens; max_model_len is 200"),
        ({"num_pages": 6}, [1] * 13, r"\(5 tokens\) and its negative prompt \(13\)"),
    ],
)
def test_a_negative_prompt_that_could_never_run_is_rejected(rig, options, negative, message):
    r = rig(**options)
    with pytest.raises(RequestError, match=message):
        r.add("a", [1, 2, 3, 4, 5], guidance_scale=2, negative=negative)
    assert "a" not in r.scheduler.queues.unfinished


def test_the_ids_of_negative_sequences_are_reserved(rig):
    with pytest.raises(RequestError, match="must not end in '~negative'"):
        rig().add("a~negative", [1])
