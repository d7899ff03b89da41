"""llm.list_requests(): what is unfinished, seen between two steps, without waiting for one."""

from __future__ import annotations

import threading
import time

import pytest

from sdk import SamplingParams
from sdk.testing import FakeLLM, ManualClock


@pytest.fixture
def clock():
    return ManualClock(10.0)


@pytest.fixture
def llm(clock):
    with FakeLLM(
        "one two three four five",
        clock=clock,
        sleep=clock.sleep,
        seconds_per_token=1.0,
        max_num_seqs=2,
        max_model_len=64,
    ) as made:
        yield made


def test_nothing_runs(llm):
    assert llm.list_requests() == []


def test_a_request_from_the_inbox_to_its_end(llm, clock):
    params = SamplingParams(max_tokens=8, tenant="acme")
    llm.enqueue("hello there", params, request_id="r", priority=3)
    clock.sleep(2.0)
    [info] = llm.list_requests()  # not in the engine yet
    assert (info.request_id, info.index, info.kind, info.state) == ("r", 0, "generate", "waiting")
    assert (info.tenant, info.adapter, info.priority, info.age) == ("acme", None, 3, 2.0)
    assert (info.num_prompt_tokens, info.num_computed_tokens, info.kv_pages) == (2, 0, {})
    llm.step()
    [info] = llm.list_requests()
    assert (info.state, info.num_computed_tokens, info.num_generated_tokens) == ("decoding", 2, 1)
    assert (info.max_tokens, info.age, info.kv_pages) == (8, 3.0, {16: 1})
    llm.wait_for_completion()
    assert llm.list_requests() == []


def test_waiting_and_preempted_requests(llm):
    llm.enqueue(["a", "b", "c"], SamplingParams(max_tokens=4))
    llm.step()
    assert [info.state for info in llm.list_requests()] == ["decoding", "decoding", "waiting"]
    llm._driver.between_steps(llm._driver.engine.scheduler.queues.preempt_last)
    info = llm.list_requests()[1]
    assert (info.state, info.num_computed_tokens, info.num_preemptions) == ("preempted", 0, 1)
    assert info.num_generated_tokens == 1 and info.kv_pages == {16: 0}


def test_a_prompt_in_chunks(llm):
    llm.enqueue(" ".join("abcdefghij"))
    llm._driver._step(most_tokens=4)
    [info] = llm.list_requests()
    assert (info.state, info.num_computed_tokens, info.num_generated_tokens) == ("prefill", 4, 0)


def test_each_answer_is_listed_until_it_ends(llm):
    answers = iter(["short", "a longer answer"])
    with FakeLLM(lambda prompt: next(answers)) as llm:
        llm.enqueue("x", SamplingParams(n=2), request_id="r")
        llm.step()
        assert [(info.request_id, info.index) for info in llm.list_requests()] == [
            ("r", 0),
            ("r", 1),
        ]
        llm.step()
        assert [info.index for info in llm.list_requests()] == [1]


def test_pages_by_bits_where_they_have_tiers(rig):
    from sdk.engine.running_requests import request_info

    r = rig(num_pages=20, kv_bits=(16, 8, 4), enable_prefix_caching=False)
    requests = [r.add(str(i), [i * 31 + j for j in range(24)], max_tokens=16) for i in range(3)]
    while r.scheduler.queues.num_running + r.scheduler.queues.num_waiting:
        r.step()
        for request in requests:
            if request.finished:
                continue
            info = request_info("r", 0, request, r.scheduler, r.now)
            assert sum(info.kv_pages.values()) == len(request.pages)
            assert info.kv_pages.keys() == {16, 8, 4}
            if info.kv_pages[8]:
                return
    raise AssertionError("no page was moved to a lower tier")


def test_it_does_not_wait_for_a_step_that_runs():
    """The step ends only after the list was read: if it waited, this test would hang."""
    inside, leave = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        inside.set()
        assert leave.wait(60)

    with FakeLLM("one two", sleep=sleep, seconds_per_token=1.0) as llm:
        try:
            stream = llm.stream("hello")
            assert inside.wait(60)
            llm.enqueue("other", request_id="other")
            first, second = llm.list_requests()
            assert (first.state, first.num_computed_tokens) == ("prefill", 0)
            assert (second.request_id, second.state) == ("other", "waiting")
            assert llm.stats().requests.num_unfinished == 1
        finally:
            leave.set()
        list(stream)


def test_a_reader_sees_a_consistent_view_while_steps_run():
    """Computed tokens are always one less than those known, or less: never between two counters."""
    stop, errors, looks = threading.Event(), [], []

    with FakeLLM("a b c d e f g h", seconds_per_token=0.0002, max_num_seqs=8) as llm:

        def read() -> None:
            while not stop.is_set():
                try:
                    found = llm.list_requests()
                    names = [(info.request_id, info.index) for info in found]
                    assert len(set(names)) == len(names)
                    for info in found:
                        known = info.num_prompt_tokens + info.num_generated_tokens
                        assert info.num_computed_tokens < known
                        assert info.state != "decoding" or info.num_computed_tokens == known - 1
                        assert info.state == "waiting" or info.num_generated_tokens < 9
                    looks.append(len(found))
                    time.sleep(0.0001)  # readers that never rest keep the engine from the GIL
                except BaseException as error:
                    errors.append(error)
                    return

        reader = threading.Thread(target=read)
        reader.start()
        for _ in range(8):
            llm.generate([str(i) for i in range(12)], use_tqdm=False)
        stop.set()
        reader.join()
    assert errors == [] and max(looks) > 0


def test_a_reader_that_never_meets_a_quiet_moment_waits_for_the_step(monkeypatch):
    from sdk.requests.driving import driver

    monkeypatch.setattr(driver, "_MOST_LOOKS", 0)
    with FakeLLM("one two", seconds_per_token=0.01) as llm:
        stream = llm.stream("hello")
        next(stream)
        assert len(llm.list_requests()) <= 1
        list(stream)


def test_what_goes_wrong_in_a_look_is_raised(llm):
    with pytest.raises(ZeroDivisionError):
        llm._driver.observe(lambda: 1 // 0)
