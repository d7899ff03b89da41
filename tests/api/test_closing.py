"""Closing an engine whose workers hang, that never got a thread, or whose close was interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import sdk.loading.load
import sdk.requests.driving.driver
from sdk import LLM, EngineClosedError, SdkError
from tests.api.engines import LIMIT, LONG, SHORT, Caller, ask, ids, settle, tokens


def _enqueue_and_step(llm: LLM, params: Any) -> None:
    llm.enqueue(ids(1), params)
    while llm.has_unfinished_requests:
        llm.step()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "use", [lambda llm, params: ask(llm, 1, params=params), _enqueue_and_step], ids=["call", "step"]
)
def test_a_worker_that_is_stopped_in_a_step_is_killed_by_close(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[LLM, Any], Any]
) -> None:
    monkeypatch.setattr(sdk.requests.driving.driver, "_CLOSE_TIMEOUT_S", 0.5)
    before = set(psutil.Process().children())
    llm = LLM(tiny_path, max_model_len=128, tensor_parallel_size=2)
    [worker] = set(psutil.Process().children()) - before
    stopped = threading.Event()

    def stop(generated: Any, logits: Any) -> Any:
        if len(generated) == 3:
            worker.suspend()
            stopped.set()
        return logits

    caller = Caller(lambda: use(llm, LONG.clone(logits_processors=[stop])))
    assert stopped.wait(LIMIT)
    assert Caller(llm.close).get() is None  # within LIMIT: the collective would wait for 300 s
    assert isinstance(caller.get(), EngineClosedError)
    assert not worker.is_running()
    assert Caller(llm.close).get() is None


@contextmanager
def _no_threads() -> Iterator[None]:
    """A stack that the system cannot give: threads fail to start as at a limit of processes."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)


def test_without_threads_calls_say_so_and_work_again_when_there_are_some(llm: LLM) -> None:
    with _no_threads():
        for use in (
            lambda: ask(llm, 1),
            lambda: ask(llm, 1),
            lambda: llm.stream(ids(1), SHORT),
            lambda: llm.embed(ids(1)),
        ):
            with pytest.raises(SdkError, match=r"thread cannot be started .*ulimit -u"):
                use()
        assert not llm._driver.has_work  # what was refused does not run later
        llm.enqueue(ids(2), SHORT)
        with pytest.raises(SdkError, match="thread cannot be started"):
            llm.wait_for_completion()
        outputs = []
        while llm.has_unfinished_requests:  # stepping by hand needs no thread
            outputs += llm.step()
    assert [tokens(outputs[-1])] == ask(llm, 2)
    settle(llm)


def test_close_works_where_no_thread_was_to_be_had(llm: LLM) -> None:
    with _no_threads():
        with pytest.raises(SdkError, match="thread cannot be started"):
            ask(llm, 1)
        llm.close()
    with pytest.raises(EngineClosedError, match="closed"):
        ask(llm, 1)


def _engines() -> set[threading.Thread]:
    """The threads of engines, also of those that other tests share."""
    return {thread for thread in threading.enumerate() if thread.name == "sdk-engine"}


def test_a_start_of_the_thread_that_is_interrupted_is_made_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, others = threading.Thread.start, set(threading.enumerate())

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(ids(1), SHORT)
    assert len(ask(llm, 1)[0]) == 8
    until = time.monotonic() + 10  # the first thread ends when it finds that it is not the driver's
    while len(_engines() - others) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(_engines() - others) == 1
    llm.close()
    assert not _engines() - others


def test_a_close_that_was_interrupted_can_be_made_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(threading.enumerate())
    assert len(ask(llm, 1)[0]) == 8  # torch may start threads of its own in it
    own = _engines() - others
    threads = psutil.Process().num_threads() - len(own)

    def press(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup ignores it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm._driver._engine, "close", press)
            with pytest.raises(KeyboardInterrupt):
                llm.close()
    finally:
        signal.signal(signal.SIGINT, before)
    llm.close()
    assert not _engines() - others
    # The native ones go too. A joined thread is still counted while the kernel takes it down.
    deadline = time.monotonic() + 10
    while psutil.Process().num_threads() >= threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert psutil.Process().num_threads() < threads


@pytest.mark.slow
def test_an_error_at_the_end_of_a_start_closes_the_ranks(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(sdk.loading.load, "load_warnings", fail)
    before = set(psutil.Process().children())
    with pytest.raises(MemoryError) as raised:  # its traceback keeps the executor from being freed
        LLM(tiny_path, max_model_len=128, tensor_parallel_size=2)
    assert set(psutil.Process().children()) == before
    del raised
