"""Replicas and their parent are killed and stopped: no answer is lost, wrong or late for long."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, EngineDeadError, RequestOutput, SamplingParams
from tests.cluster.replicas.conftest import LIMIT_S, children, hurt, replicas, wait_for

PROMPTS = [f"prompt {i} of many" for i in range(10)]
LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True, logprobs=1)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def llm(tiny_path: Path) -> Any:
    with LLM(tiny_path, max_model_len=128, data_parallel_size=2, num_threads=2) as llm:
        yield llm


def in_background(llm: LLM, found: list[Any]) -> threading.Thread:
    def run() -> None:
        try:
            found.append(tokens(llm.generate(PROMPTS, LONG)))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def running(llm: LLM) -> bool:
    return any(one.replica >= 0 for one in list(llm._driver._requests.values()))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_requests_of_a_lost_replica_run_again_with_the_same_answers(
    llm: LLM, one: LLM, how: int
) -> None:
    expected = tokens(one.generate(PROMPTS, LONG))
    victim, found = replicas(llm)[0], []
    thread = in_background(llm, found)
    wait_for(lambda: running(llm), "a running request")
    hurt(victim.pid, how)
    thread.join(LIMIT_S)
    assert found == [expected]
    wait_for(lambda: llm._driver.processes.num_ready == 2, "a new replica")
    assert llm.get_metrics()["num_replicas_replaced"] == 1
    assert tokens(llm.generate(PROMPTS, LONG)) == expected


@pytest.mark.slow
def test_a_lost_parent_is_started_again(llm: LLM, one: LLM) -> None:
    expected = tokens(one.generate(PROMPTS, LONG))
    found: list[Any] = []
    thread = in_background(llm, found)
    wait_for(lambda: running(llm), "a running request")
    old = {replica.pid for replica in replicas(llm)}
    hurt(llm._driver.processes.parent.pid)
    thread.join(LIMIT_S)
    assert found == [expected]
    wait_for(lambda: llm._driver.processes.num_ready == 2, "new replicas")
    assert not old & children()


@pytest.mark.slow
def test_a_stream_goes_on_without_a_seam(llm: LLM, one: LLM) -> None:
    params = LONG.clone(n=2)
    [whole] = one.generate(PROMPTS[0], params)
    seams = sum(check_stream(llm, whole, params) for _ in range(5))
    assert seams  # a tiny model may have finished before its replica was killed


def check_stream(llm: LLM, whole: RequestOutput, params: SamplingParams) -> bool:
    """Read a stream whose replica is killed after the first piece. Whether it ran again."""
    wait_for(lambda: llm._driver.processes.num_ready == 2, "two replicas")
    texts, ids, scores = ["", ""], [[], []], [[], []]
    again = False
    for piece in llm.stream(PROMPTS[0], params):
        for answer in piece.outputs:
            index = answer.index
            texts[index] += answer.text
            ids[index] += answer.token_ids
            scores[index] += answer.logprobs
        requests = list(llm._driver._requests.values())
        if requests and not again:
            hurt(replicas(llm)[requests[0].replica].pid)
            again = True
    for answer in whole.outputs:
        assert ids[answer.index] == list(answer.token_ids)
        assert texts[answer.index] == answer.text
        assert len(scores[answer.index]) == len(answer.token_ids)
    return again


@pytest.mark.slow
def test_an_aborted_request_of_a_lost_replica_ends(llm: LLM) -> None:
    llm.enqueue(PROMPTS[0], LONG, request_id="one")
    wait_for(lambda: running(llm), "a running request")
    [request] = llm._driver._requests.values()
    hurt(replicas(llm)[request.replica].pid, signal.SIGSTOP)
    llm.abort("one")
    ended = []
    while llm.has_unfinished_requests:
        ended += llm.step()
    assert ended[-1].outputs[0].finish_reason in ("abort", "length")


@pytest.mark.slow
def test_a_request_that_takes_replicas_with_it_is_given_up(llm: LLM) -> None:
    found: list[Any] = []

    def run() -> None:
        try:
            llm.generate(PROMPTS[0], LONG.clone(max_tokens=120))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while thread.is_alive() and time.monotonic() < deadline:
        for request in list(llm._driver._requests.values()):
            number = request.replica
            if number >= 0:
                hurt(replicas(llm)[number].pid)
        time.sleep(0.002)
    thread.join(1)
    [error] = found
    assert isinstance(error, EngineDeadError)
    assert "replicas were lost" in str(error)


@pytest.mark.slow
def test_a_new_replica_gets_pins_and_settings(tiny_path: Path, one: LLM) -> None:
    options = {"scheduling_policy": "fair", "max_model_len": 128, "data_parallel_size": 2}
    prompt = "a long beginning that many requests have in common, kept for them all " * 2
    other = "another beginning, as long as the first one, restored from a snapshot"
    with LLM(tiny_path, **options) as llm:
        llm.set_tenant_weight("a", 4.0)
        llm.set_slo("ttft=1")
        llm.pin(prompt)
        llm.restore(one.snapshot(other), pin=True)
        before = llm._driver.call_all("", "get_metrics")
        for victim in replicas(llm):
            hurt(victim.pid)
        wait_for(lambda: llm._driver.processes.num_replaced == 2, "replacements")
        wait_for(lambda: llm._driver.processes.num_ready == 2, "new replicas")
        wait_for(
            lambda: (
                [part["num_pages_pinned"] for part in llm._driver.call_all("", "get_metrics")]
                == [part["num_pages_pinned"] for part in before]
            ),
            "the pins",
        )
        assert llm.stats().slo is not None
        assert llm.unpin(prompt)
        llm.sleep(1)
        hurt(replicas(llm)[0].pid)
        wait_for(lambda: llm._driver.processes.num_replaced == 3, "a replacement")
        wait_for(lambda: llm._driver.processes.num_ready == 2, "a new replica")
        llm.wake_up()
        assert tokens(llm.generate(PROMPTS, LONG)) == tokens(one.generate(PROMPTS, LONG))


@pytest.mark.slow
def test_a_parent_that_ends_again_and_again_is_given_up(llm: LLM) -> None:
    """As if the system lacked the memory to read the model once more."""
    found: list[Any] = []
    thread = in_background(llm, found)
    deadline, last = time.monotonic() + LIMIT_S, -1
    while thread.is_alive() and time.monotonic() < deadline:
        parent = llm._driver.processes.parent
        if parent is not None and parent.pid != last:
            last = parent.pid
            hurt(last)
        time.sleep(0.01)
    thread.join(1)
    [error] = found
    assert isinstance(error, EngineDeadError)
    assert "ended 3 times before a replica was ready" in str(error)


@pytest.mark.slow
def test_a_replica_that_cannot_be_started_now_is_started_later(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, failures = llm._driver.processes.parent, iter([OSError(24, "no descriptors left")])
    fork = parent.fork

    def failing(*args: Any) -> Any:
        for error in failures:
            raise error
        return fork(*args)

    monkeypatch.setattr(parent, "fork", failing)
    hurt(replicas(llm)[0].pid)
    wait_for(lambda: llm._driver.processes.num_replaced == 1, "the loss")
    wait_for(lambda: llm._driver.processes.num_ready == 2, "a new replica")
    assert next(failures, None) is None


@pytest.mark.slow
def test_the_callback_of_the_load_is_not_called_later(tiny_path: Path) -> None:
    calls: list[int] = []
    options = {"max_model_len": 128, "data_parallel_size": 2}
    with LLM(tiny_path, on_progress=lambda *args: calls.append(1), **options) as llm:
        assert calls
        calls.clear()
        hurt(llm._driver.processes.parent.pid)
        wait_for(lambda: llm._driver.processes.num_ready == 0, "the loss")
        wait_for(lambda: llm._driver.processes.num_ready == 2, "new replicas")
    assert not calls


@pytest.mark.slow
def test_numbers_wait_for_a_replica(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica is replaced before the caller waits: else one may run before both are lost."""
    driver, processes = llm._driver, llm._driver.processes
    start, wait = processes._start_due, driver._changed.wait_for
    waiting = threading.Event()

    def wait_for_a_replica(*args: Any) -> Any:
        waiting.set()
        return wait(*args)

    monkeypatch.setattr(processes, "_start_due", lambda: waiting.is_set() and start())
    for victim in replicas(llm):
        hurt(victim.pid)
    wait_for(lambda: not driver._router.alive, "no replica")
    monkeypatch.setattr(driver._changed, "wait_for", wait_for_a_replica)
    assert processes.num_ready == 0
    assert llm.get_metrics()["num_replicas"] >= 1
    assert waiting.is_set()


@pytest.mark.slow
def test_close_while_a_replica_is_stopped_leaves_nothing(tiny_path: Path) -> None:
    before = children()
    llm = LLM(tiny_path, max_model_len=128, data_parallel_size=2)
    hurt(replicas(llm)[1].pid, signal.SIGSTOP)
    begin = time.monotonic()
    llm.close()
    assert time.monotonic() - begin < LIMIT_S
    assert children() == before
