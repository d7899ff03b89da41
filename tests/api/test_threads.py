"""Threads, event loops and frame loops on one engine, and closing it under them."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, EngineClosedError, RequestOutput, SamplingParams
from sdk.api.options import engine_config
from sdk.engine.rank.runner import ModelRunner
from sdk.loading import load as loading
from tests.api.engines import LIMIT, LONG, SHORT, Caller, Gate, ask, books, ids, settle, tokens


def test_two_event_loops_in_two_threads_share_one_engine(tiny: LLM) -> None:
    expected = ask(tiny, *range(5))

    async def session() -> list[list[int]]:
        async def streamed(seed: int) -> list[int]:
            return [t async for piece in tiny.astream(ids(seed), SHORT) for t in tokens(piece)]

        async def whole(seed: int) -> list[int]:
            return tokens((await tiny.agenerate(ids(seed), SHORT))[0])

        answers = [streamed(seed) for seed in range(5)] + [whole(seed) for seed in range(5)]
        return list(await asyncio.gather(*answers))

    callers = [Caller(lambda: asyncio.run(session())) for _ in range(2)]
    assert [caller.get() for caller in callers] == [expected * 2] * 2
    settle(tiny)


@pytest.mark.parametrize("pieces", [0, 1])
def test_a_forgotten_stream_is_aborted(llm: LLM, pieces: int) -> None:
    gate = Gate(at=1 + pieces)
    stream = llm.stream(ids(1), LONG.clone(logits_processors=[gate]))
    for _ in range(pieces):
        next(stream)
    gate.wait()
    del stream
    gc.collect()
    gate.open()
    settle(llm)
    assert gate.calls == 1 + pieces


def test_closing_ends_what_was_enqueued_and_whoever_waits_for_it(tiny_path: Path) -> None:
    llm = LLM(tiny_path, max_model_len=128)
    llm.enqueue([ids(1), ids(2)], SHORT)
    llm.close()
    for use in (llm.wait_for_completion, llm.step, lambda: llm.pump(1)):
        with pytest.raises(EngineClosedError):
            use()
    llm = LLM(tiny_path, max_model_len=128)
    gate = Gate()
    llm.enqueue([ids(1), ids(2)], LONG.clone(logits_processors=[gate]))
    waiting = Caller(llm.wait_for_completion)
    gate.wait()
    closing = Caller(llm.close)
    _until(lambda: llm._driver._closed)
    gate.open()
    assert closing.get() is None
    assert isinstance(waiting.get(), EngineClosedError)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end


def test_closing_in_one_thread_wakes_all_who_wait_in_others(tiny_path: Path) -> None:
    llm = LLM(tiny_path, max_model_len=128)
    gate = Gate()
    held = LONG.clone(logits_processors=[gate])

    async def astream() -> int:
        return len([piece async for piece in llm.astream(ids(3), LONG)])

    callers = [Caller(lambda: ask(llm, 1, params=held))]
    gate.wait()
    callers += [
        Caller(lambda: list(llm.stream(ids(2), LONG))),
        Caller(lambda: asyncio.run(astream())),
    ]
    _until(lambda: len(llm._driver._sinks) == 3)
    closers = [Caller(llm.close) for _ in range(2)]
    _until(lambda: llm._driver._closed)
    gate.open()
    assert [closer.get() for closer in closers] == [None, None]
    assert all(isinstance(caller.get(), EngineClosedError) for caller in callers)


def test_two_threads_may_wait_for_what_was_enqueued(tiny: LLM) -> None:
    gate = Gate()
    tiny.enqueue([ids(1), ids(2)], SHORT.clone(logits_processors=[gate]))
    waiting = [Caller(tiny.wait_for_completion) for _ in range(2)]
    gate.wait()
    gate.open()
    assert sorted(len(caller.get()) for caller in waiting) == [0, 2]


def test_what_is_enqueued_runs_beside_other_calls_but_not_after_them(tiny: LLM) -> None:
    [name] = tiny.enqueue(ids(2), LONG)
    assert len(ask(tiny, 1)[0]) == 8
    assert not tiny._driver._background and tiny.has_unfinished_requests
    first = tiny.step()[-1]
    assert first.request_id == name and not first.finished
    assert len(tokens(tiny.step()[-1])) == len(tokens(first)) + 1
    [output] = tiny.wait_for_completion()
    assert len(tokens(output)) == 100


@pytest.mark.parametrize("deltas", [False, True])
def test_a_frame_loop_gets_its_answers_while_other_threads_generate(
    tiny: LLM, deltas: bool
) -> None:
    from sdk import RequestOutputKind

    kind = RequestOutputKind.DELTA if deltas else RequestOutputKind.CUMULATIVE
    expected = ask(tiny, *range(6), params=LONG)
    others = [Caller(lambda: ask(tiny, *range(6), params=LONG)) for _ in range(2)]
    names = tiny.enqueue([ids(seed) for seed in range(6)], LONG.clone(output_kind=kind))
    answers: dict[str, list[int]] = {name: [] for name in names}
    finished = []
    while len(finished) < 6:
        assert tiny.has_unfinished_requests
        for output in tiny.pump(1):
            known = answers[output.request_id] if deltas else []  # KeyError: somebody else's
            answers[output.request_id] = known + tokens(output)
            finished += [output.request_id] * output.finished
    assert list(answers.values()) == expected and len(set(finished)) == 6
    assert [caller.get() for caller in others] == [expected] * 2
    assert tiny.wait_for_completion() == [] and tiny.step() == []
    settle(tiny)


def test_a_frame_loop_steps_before_the_engine_thread_does_again(tiny: LLM) -> None:
    gate = Gate(at=5)
    other = Caller(lambda: ask(tiny, 1, params=LONG.clone(logits_processors=[gate])))
    gate.wait()
    steppers: list[int | None] = []

    def note(generated: Any, logits: Any) -> Any:
        steppers.append(threading.get_ident())
        return logits

    [name] = tiny.enqueue(ids(2), SHORT.clone(logits_processors=[note]))
    frame = Caller(tiny.step)
    _until(lambda: frame.ident in tiny._driver._lock_waiters)
    gate.open()
    output = frame.get()[0]
    assert output.request_id == name and steppers[0] == frame.ident
    assert len(other.get()[0]) == 100 and steppers[-1] != frame.ident
    assert len(tokens(tiny.wait_for_completion()[0])) == 8


def test_a_thousand_requests_and_random_aborts_all_end_and_are_counted(tiny_path: Path) -> None:
    rng = random.Random(5)
    with LLM(tiny_path, max_model_len=64, max_num_seqs=64, kv_cache_memory_bytes="2MiB") as llm:
        lengths = [rng.randrange(1, 7) for _ in range(1000)]
        names = llm.enqueue(
            [ids(rng.randrange(40), rng.randrange(1, 40)) for _ in lengths],
            [SHORT.clone(max_tokens=length) for length in lengths],
        )
        wanted = dict(zip(names, lengths, strict=True))
        last: dict[str, RequestOutput] = {}
        aborted: set[str] = set()
        for step in range(5000):
            if not llm.has_unfinished_requests:
                break
            if rng.random() < 0.5:
                name = rng.choice(names)
                aborted.add(name)
                llm.abort(name)
            for output in llm.step():
                assert not (output.request_id in last and last[output.request_id].finished)
                last[output.request_id] = output
            if step % 10 == 0:
                books(llm).check()
        books(llm).check()
        reasons = {name: last[name].outputs[0].finish_reason for name in names}
        assert set(reasons.values()) == {"length", "abort"}
        assert {name for name in names if reasons[name] == "abort"} <= aborted
        for name in names:
            assert last[name].finished
            if reasons[name] == "length":
                assert len(tokens(last[name])) == wanted[name]
        metrics = llm.get_metrics()
        assert metrics["num_finished"] == 1000
        assert metrics["num_generation_tokens"] == sum(len(tokens(o)) for o in last.values())
        assert metrics["num_running"] == metrics["num_waiting"] == metrics["num_pages_used"] == 0


def test_the_engine_s_gpu_is_current_in_whichever_thread_works_for_it(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = threading.local()
    seen: list[tuple[str, int]] = []

    @contextmanager
    def device(name: str) -> Iterator[None]:
        before = getattr(current, "name", "cuda:0")
        current.name = name
        yield
        current.name = before

    monkeypatch.setattr(loading, "device_of", lambda config: "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    config = engine_config(tiny_path)
    assert loading._device(config) == "cuda:1"
    monkeypatch.undo()
    monkeypatch.setattr("sdk.kernels.context.nullcontext", lambda: device("cuda:1"))

    def noted(name: str) -> None:
        function = getattr(ModelRunner, name)

        def noting(self: Any, *args: Any) -> Any:
            seen.append((getattr(current, "name", "cuda:0"), threading.get_ident()))
            return function(self, *args)

        monkeypatch.setattr(ModelRunner, name, noting)

    with LLM(tiny_path, max_model_len=64) as llm:
        for name in ("launch", "record"):
            noted(name)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True))
        llm.trim()
        llm.sleep(2)
        llm.wake_up()
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert {name for name, _ in seen} == {"cuda:1"}
    assert len({thread for _, thread in seen}) == 2  # its own, and this one
    assert not hasattr(current, "name") or current.name == "cuda:0"
