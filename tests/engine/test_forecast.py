"""Step times are learned from steps, and looking ahead agrees with what a scheduler then does."""

from __future__ import annotations

import pytest
from fake_runner import VOCAB

from sdk.api.params import SamplingParams
from sdk.engine.scheduling.forecast import Work, forecast
from sdk.engine.scheduling.step_times import StepTimes
from sdk.requests.driving.waiting_times import estimate
from sdk.requests.prompts.reader import Prompt

FIXED, TOKEN, PAIR = 0.004, 0.0005, 1e-6


def prompt(length: int, seed: int = 1) -> list[int]:
    return [(seed * 7919 + i * 31) % VOCAB for i in range(length)]


def seconds(rows: int, parts) -> float:
    time = FIXED + 0.0004 * rows
    return time + sum(TOKEN * n + PAIR * n * (begin + n / 2) for n, begin in parts)


def step(r) -> None:
    plan = r.scheduler.plan()
    batch = r.scheduler._in_flight.batches[-1]
    rows, parts = batch.num_decodes, []
    for one, row in zip(batch.sequences, plan.rows, strict=True):
        if one.num_computed + row.num_scheduled_tokens <= one.num_prompt_tokens:
            parts.append((row.num_scheduled_tokens, one.num_computed))
    r.now += seconds(rows, parts)
    r.scheduler.commit(r.runner.execute(plan))


def run(r) -> None:
    while r.scheduler.queues.unfinished:
        step(r)


def trained(rig, **options):
    """A scheduler that has run prompts of several lengths and answers of one to four requests."""
    r = rig(max_num_seqs=4, max_num_batched_tokens=32, num_pages=300, **options)
    for length in (5, 20, 60, 150):
        for count in range(1, 5):
            for i in range(count):
                r.add(f"{length}-{count}-{i}", prompt(length, 10 * length + i), max_tokens=12)
            run(r)
            r.now += 100.0  # idle: must not count
    return r


def ask(r, length: int, seed: int, **params):
    given = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **params})
    read = Prompt(tuple(prompt(length, seed)), None)
    return estimate(r.scheduler, read, given, None)


def test_the_times_of_steps_are_learned_without_idle_time(rig):
    times = trained(rig).scheduler.times
    assert times.known
    for rows in (1, 2, 3, 4):
        assert times.decode(rows) == pytest.approx(seconds(rows, []), rel=0.05)
    for tokens, context in ((32, 0), (32, 100), (8, 40)):
        added = TOKEN * tokens + PAIR * tokens * (context + tokens / 2)
        assert times.prompt(tokens, context) == pytest.approx(added, rel=0.25)
    assert times.error < 0.2


def test_a_request_on_an_idle_engine_takes_what_was_estimated(rig):
    r = trained(rig)
    for number, (length, answer) in enumerate(((10, 4), (90, 20), (180, 9))):
        found = ask(r, length, 5000 + number, max_tokens=answer)
        assert (found.num_prompt_tokens, found.num_cached_tokens) == (length, 0)
        begin = r.now
        one = r.add(f"x{number}", prompt(length, 5000 + number), max_tokens=answer)
        run(r)
        first, last = one.first_token_ts - begin, one.last_token_ts - begin
        assert first == pytest.approx(found.first_token, rel=0.15)
        assert last == pytest.approx(found.finish, rel=0.15)
        assert found.first_token_range[0] <= first <= found.first_token_range[1]
        assert found.finish_range[0] <= last <= found.finish_range[1]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_queue_before_a_request_is_taken_into_account(rig, policy):
    r = trained(rig, policy=policy)
    for i in range(12):
        name = f"batch{i}"
        r.add(name, prompt(40 + i, 700 + i), max_tokens=15, ignore_eos=True, tenant="batch")
    for _ in range(3):
        step(r)
    found = ask(r, 50, 900, tenant="batch")
    assert found.num_waiting >= 8
    begin = r.now
    one = r.add("one", prompt(50, 900), max_tokens=20, tenant="batch")
    run(r)
    assert one.first_token_ts - begin == pytest.approx(found.first_token, rel=0.2)
    assert one.last_token_ts - begin == pytest.approx(found.finish, rel=0.2)


def test_one_that_overtakes_does_not_wait_for_the_queue(rig):
    r = trained(rig, policy="fair", tenant_weights={"chat": 4})
    for i in range(12):
        r.add(f"batch{i}", prompt(40 + i, 700 + i), max_tokens=60, ignore_eos=True, tenant="batch")
    for _ in range(30):
        step(r)
    patient, chat = ask(r, 50, 900, tenant="batch"), ask(r, 50, 901, tenant="chat")
    assert chat.num_waiting == 0 and patient.num_waiting >= 8
    assert chat.first_token < patient.first_token / 4
    begin = r.now
    one = r.add("one", prompt(50, 901), max_tokens=20, tenant="chat")
    run(r)
    assert one.first_token_ts - begin == pytest.approx(chat.first_token, rel=0.4)


def test_cached_tokens_are_not_computed_again(rig):
    r = trained(rig)
    cold = ask(r, 160, 950)
    r.add("first", prompt(160, 950), max_tokens=1)
    run(r)
    warm = ask(r, 160, 950)
    assert warm.num_cached_tokens == 156 and warm.first_token < cold.first_token / 5


def test_the_length_of_an_answer_is_guessed_from_the_last_ones(rig):
    r = trained(rig)
    forced, guessed = (
        ask(r, 20, 960, max_tokens=120),
        ask(r, 20, 961, max_tokens=120, ignore_eos=False),
    )
    assert guessed.finish < forced.finish / 4, "answers had twelve tokens"
    assert guessed.first_token == pytest.approx(forced.first_token)


def test_before_the_first_steps_nothing_is_known(rig):
    found = ask(rig(), 20, 1)
    assert found.first_token is found.finish is found.finish_range is None
    assert found.num_prompt_tokens == 20


def test_an_estimate_changes_nothing(rig):
    r = trained(rig, policy="fair")
    for i in range(9):
        r.add(f"{i}", prompt(20, i), tenant="ab"[i % 2], max_tokens=30)
    for _ in range(5):
        step(r)
    policy = r.scheduler.queues.policy
    before = dict(policy._used), dict(policy._running), dict(policy._unfinished)
    for i in range(5):
        ask(r, 30, i, tenant="new")
    assert before == (policy._used, policy._running, policy._unfinished)
    r.scheduler.check()
    r.run()
    r.assert_answers()


def test_a_request_that_needs_more_slots_than_there_are_ends_the_simulation():
    times = StepTimes()
    times.begin(0.0, 0, 1, 0, 0.0, 0)
    times.end(0.01, 1, 1)
    times.begin(0.0, 1, 0, 100, 5000.0, 0)
    times.end(0.11, 2, 0)
    first, finish = forecast(
        times, [], [], Work(10, 0, 10, slots=2), [], max_num_seqs=1, step_tokens=64
    )
    assert 0 < first < finish


def test_a_long_queue_is_extrapolated():
    times = StepTimes()
    times.begin(0.0, 0, 1, 0, 0.0, 0)
    times.end(0.01, 1, 1)
    times.begin(0.0, 1, 0, 100, 5000.0, 0)
    times.end(0.11, 2, 0)
    limits = {"max_num_seqs": 4, "step_tokens": 64}

    def first(count: int) -> float:
        ahead = [Work(10, 0, 10) for _ in range(count)]
        return forecast(times, [], ahead, Work(10, 0, 10), [], **limits)[0]

    assert first(2000) == pytest.approx(2000 / 250 * first(250), rel=0.1)
