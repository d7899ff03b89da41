"""What was enqueued is waited for once, by whoever asks, and nothing else is."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from sdk import LLM, RequestError, RequestOutputKind, SamplingParams
from tests.api.engines import LONG, SHORT, Caller, Gate, ask, books, ids, settle, tokens


def test_a_request_that_was_refused_is_not_waited_for(llm: LLM) -> None:
    [expected] = ask(llm, 1)
    llm.sleep(1)
    with pytest.raises(RequestError, match="sleeps"):
        llm.enqueue(ids(1), SHORT)
    llm.wake_up()
    assert Caller(llm.wait_for_completion).get() == []
    llm.enqueue(ids(1), SHORT)
    assert [tokens(output) for output in Caller(llm.wait_for_completion).get()] == [expected]
    settle(llm)


def test_a_request_enqueued_while_another_thread_waits_is_left_for_the_next_call(
    tiny: LLM,
) -> None:
    gate = Gate()
    [held] = tiny.enqueue(ids(1), SHORT.clone(logits_processors=[gate]))
    waiting = Caller(tiny.wait_for_completion)
    gate.wait()
    [late] = tiny.enqueue(ids(2), SHORT)
    gate.open()
    assert [output.request_id for output in waiting.get()] == [held]
    assert [output.request_id for output in tiny.wait_for_completion()] == [late]
    settle(tiny)


def test_requests_enqueued_by_many_threads_are_all_returned_once(tiny: LLM) -> None:
    names: list[str] = []
    found: list[str] = []

    def enqueue() -> None:
        for seed in range(20):
            names.extend(tiny.enqueue(ids(seed), SHORT.clone(max_tokens=1 + seed % 4)))
            found.extend(output.request_id for output in tiny.wait_for_completion())

    callers = [Caller(enqueue) for _ in range(4)]
    assert [caller.get() for caller in callers] == [None] * 4
    found += [output.request_id for output in tiny.wait_for_completion()]
    assert sorted(found) == sorted(names)
    settle(tiny)


def test_a_refusal_by_the_engine_is_raised_and_the_other_answers_are_kept(llm: LLM) -> None:
    expected = ask(llm, 1, 2)
    llm.pin({"prompt_token_ids": list(range(3, 100))})
    # fits the context, but not the pages that the pin leaves once they are fewer
    llm.resize(
        llm.memory_plan.serving - (llm.memory_plan.num_pages - 9) * llm.memory_plan.page_bytes
    )
    first, _, last = llm.enqueue([ids(1), ids(7, 100), ids(2)], SHORT)
    with pytest.raises(RequestError, match="are pinned"):
        Caller(llm.wait_for_completion).get_or_raise()
    outputs = Caller(llm.wait_for_completion).get()
    assert [output.request_id for output in outputs] == [first, last]
    assert [tokens(output) for output in outputs] == expected
    assert Caller(llm.wait_for_completion).get() == []


def test_ctrl_c_aborts_what_is_waited_for_and_the_next_call_returns_it(llm: LLM) -> None:
    gate = Gate(at=3)
    llm.enqueue([ids(1), ids(2)], LONG.clone(logits_processors=[gate]))

    def press() -> None:
        gate.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
    presser = Caller(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.wait_for_completion()
    finally:
        signal.signal(signal.SIGINT, before)
    presser.get()
    gate.open()
    outputs = Caller(llm.wait_for_completion).get()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 2
    assert all(len(tokens(output)) < 100 for output in outputs)
    settle(llm)


def test_waiting_for_nothing_returns_at_once(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64) as llm:
        assert llm.wait_for_completion() == []


@pytest.mark.parametrize("how", ["stream", "enqueue"])
def test_each_of_several_answers_says_once_that_it_is_finished(tiny: LLM, how: str) -> None:
    # answers of different lengths: whoever is done waits for the others
    params = SamplingParams(
        n=4, temperature=1.0, seed=3, max_tokens=40, stop_token_ids=list(range(3, 60))
    )
    [whole] = tiny.generate(ids(1), params)
    assert len({len(one.token_ids) for one in whole.outputs}) > 1
    if how == "stream":
        pieces = list(tiny.stream(ids(1), params))
    else:
        tiny.enqueue(ids(1), params.clone(output_kind=RequestOutputKind.DELTA))
        pieces = []
        while tiny.has_unfinished_requests:
            pieces += tiny.step()
    found: dict[int, list[int]] = {index: [] for index in range(4)}
    ended: list[int] = []
    for piece in pieces:
        assert piece.outputs, "an output without news"
        for one in piece.outputs:
            assert one.index not in ended
            found[one.index] += one.token_ids
            ended += [one.index] * one.finished
    assert sorted(ended) == [0, 1, 2, 3]
    assert found == {one.index: one.token_ids for one in whole.outputs}


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_needs_no_step(llm: LLM, steps: int) -> None:
    """A host that has aborted its requests may never step again: they hold neither pages nor a
    place in the queue."""
    [gone, stays] = llm.enqueue([ids(1), ids(2)], LONG)
    for _ in range(steps):
        llm.step()
    llm.abort([gone])
    assert [one.request_id for one in llm.list_requests()] == [stays]
    llm.abort([stays])
    assert llm.list_requests() == []
    with llm._driver._step_lock:
        assert books(llm).pool.num_available == books(llm).pool.capacity
    assert llm.has_unfinished_requests, "their last outputs are not collected yet"
    found = {output.request_id: output for output in llm.step()}
    assert {one.outputs[0].finish_reason for one in found.values()} == {"abort"}
    assert found.keys() == {gone, stays} and not llm.has_unfinished_requests
    assert ask(llm, 3) == ask(llm, 3)
