"""The public class when something goes wrong around it: NaN, Ctrl-C, callbacks, threads, closing.

Where the moment matters a logits processor holds the engine in the middle of a step until the test
has done what it wants to do there; nothing waits for a time to pass.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, EngineClosedError, EngineDeadError, RequestError, RequestOutput, SamplingParams

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds after which a wait that should be over has failed
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = LONG.clone(max_tokens=8)


def ids(seed: int, length: int = 6) -> dict[str, Any]:
    return {"prompt_token_ids": [3 + (seed * 37 + i * 11) % 400 for i in range(length)]}


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def ask(llm: LLM, *seeds: int, params: SamplingParams = SHORT) -> list[list[int]]:
    return [tokens(output) for output in llm.generate([ids(seed) for seed in seeds], params)]


def books(llm: LLM) -> Any:
    return llm._driver._engine.scheduler


def settle(llm: LLM) -> None:
    """Let the engine take all commands; then nothing runs and no page is held."""
    llm.generate(ids(0), SHORT.clone(max_tokens=1))
    with llm._driver._turn():
        books(llm).check()
        assert books(llm).num_running == books(llm).num_waiting == 0
        assert books(llm).pool.num_available == books(llm).pool.capacity


class Gate:
    """A logits processor that stops the engine in its ``at``-th call until ``open``."""

    def __init__(self, at: int = 1) -> None:
        self.calls = 0
        self.at = at
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, generated: Any, logits: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            self.reached.set()
            assert self._open.wait(LIMIT)
        return logits

    def wait(self) -> None:
        assert self.reached.wait(LIMIT)

    def open(self) -> None:
        self._open.set()


class Caller(threading.Thread):
    """Runs ``call`` and keeps what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.result = error

    def get(self) -> Any:
        self.join(LIMIT)
        assert not self.is_alive(), "the call hangs"
        return self.result


@pytest.fixture
def llm(tiny_path: Path) -> Iterator[LLM]:
    """An engine of its own for tests that damage or close it."""
    with LLM(tiny_path, max_model_len=128) as llm:
        yield llm


# ---- NaN -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["only tokens", "logprobs beside them"])
def test_nan_logits_end_exactly_their_request(llm: LLM, kind: str) -> None:
    expected = ask(llm, 1, 2, 3)
    llm.reset_prefix_cache()
    runner = llm._runner()
    assert runner is not None and runner._graph is not None
    graph, forward, again, calls = runner._graph, runner._forward, runner._graph.replay_again, 0

    @torch.inference_mode()
    def poison(logits: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            logits[1, 5] = math.nan
            runner.ops.sample_into(logits[:3], runner._inputs.sampling)

    def poisoned(*counts: int) -> Any:
        hidden, logits = forward(*counts)
        poison(logits)
        return hidden, logits

    def poisoned_again() -> None:
        again()
        poison(graph.result[1])

    runner._forward, graph.replay_again = poisoned, poisoned_again
    params = [SHORT, SHORT, SHORT if kind == "only tokens" else SHORT.clone(logprobs=1)]
    good, bad, other = llm.generate([ids(1), ids(2), ids(3)], params)
    assert [tokens(good), tokens(other)] == [expected[0], expected[2]]
    assert bad.outputs[0].finish_reason == "error" and tokens(bad) == expected[1][:3]
    assert "not finite" in str(bad.outputs[0].stop_reason)
    assert ask(llm, 2) == [expected[1]]
    settle(llm)


@pytest.mark.parametrize("compute", ["auto", "exact"])
def test_pages_with_nan_reach_neither_neighbours_nor_the_next_owner(
    tiny_path: Path, compute: str
) -> None:
    with LLM(tiny_path, max_model_len=128, compute=compute) as llm:
        expected = ask(llm, 1, 2, 3, 4, 5, 6)
        llm.reset_prefix_cache()
        names = llm.enqueue([ids(1), ids(2), ids(3)], SHORT)
        llm.step()
        runner = llm._runner()
        assert runner is not None
        [victim] = [r for r in books(llm)._running if r.request_id == names[1]]
        pages = list(victim.pages)
        for layer in runner.kv.layers:
            layer.k[pages] = math.nan
            layer.v[pages] = math.nan
        good, bad, other = llm.wait_for_completion()
        assert [tokens(good), tokens(other)] == [expected[0], expected[2]]
        assert bad.outputs[0].finish_reason == "error" and tokens(bad) == expected[1][:1]
        llm.enqueue([ids(4), ids(5), ids(6)], SHORT)
        llm.step()
        used = {page for request in books(llm)._running for page in request.pages}
        assert used & set(pages), "the poisoned page is used again"
        assert [tokens(output) for output in llm.wait_for_completion()] == expected[3:]
        assert ask(llm, 2) == [expected[1]], "nothing of the failed request was cached"


def test_an_embedding_that_is_not_finite_is_an_error(llm: LLM) -> None:
    runner = llm._runner()
    assert runner is not None
    forward = runner._forward

    @torch.inference_mode()
    def poisoned(*counts: int) -> Any:
        hidden, rows = forward(*counts)
        return hidden * math.nan, rows

    runner._forward = poisoned
    with pytest.raises(RequestError, match="hidden state is not finite"):
        llm.embed([ids(1)])
    runner._forward = forward
    assert len(llm.embed([ids(1)])[0].embedding) == llm.model_config.hidden_size
    settle(llm)


# ---- Ctrl-C --------------------------------------------------------------------------------------


def run_script(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_real_ctrl_c_leaves_an_engine_that_still_answers(tiny_path: Path) -> None:
    code = """
        import os, signal, sys, threading
        from sdk import LLM, SamplingParams
        llm = LLM(sys.argv[1], max_model_len=128)
        short = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        expected = llm.generate(prompt, short)[0].outputs[0].token_ids
        inside, go = threading.Event(), threading.Event()
        def hold(tokens, logits):
            inside.set()
            go.wait(30)
            return logits
        def press():
            inside.wait(30)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        try:
            llm.generate([prompt] * 4, short.clone(max_tokens=100, logits_processors=[hold]))
            print("not interrupted")
        except KeyboardInterrupt:
            go.set()
        assert llm.generate(prompt, short)[0].outputs[0].token_ids == expected
        assert llm.get_metrics()["num_running"] == 0
        assert llm.get_metrics()["num_generation_tokens"] < 100
        llm.close()
        assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
        print("fine")
    """
    assert run_script(code, tiny_path) == "fine\n"


def test_ctrl_c_while_loading_leaves_nothing_behind(smollm2: Path) -> None:
    code = """
        import os, signal, sys, threading
        from sdk import LLM, SamplingParams
        def left():
            gone = {"/proc/self/fd/" + name for name in os.listdir("/proc/self/fd")}
            files = [os.readlink(name) for name in gone if os.path.islink(name)]
            maps = open("/proc/self/maps").read()
            assert sys.argv[1] not in files and sys.argv[1] not in maps
            return len(files), len(os.listdir("/proc/self/task"))
        def press(stage, done, total):
            if done > total / 2:
                os.kill(os.getpid(), signal.SIGINT)
        def interrupted():
            pressed = False
            try:
                LLM(sys.argv[1], max_model_len=64, on_progress=press)
            except KeyboardInterrupt:
                pressed = True
            assert pressed
            return left()
        assert interrupted() == interrupted()
        assert threading.enumerate() == [threading.main_thread()]
        with LLM(sys.argv[1], max_model_len=64) as llm:
            assert llm.generate("Hi", SamplingParams(max_tokens=2))[0].finished
        print("fine")
    """
    assert run_script(code, smollm2) == "fine\n"


def test_an_interrupt_of_a_step_made_by_hand_repeats_the_step(llm: LLM) -> None:
    [expected] = ask(llm, 1)
    calls = iter(range(100))

    def press(generated: Any, logits: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return logits

    llm.enqueue(ids(1), SHORT.clone(logits_processors=[press]))
    outputs: list[RequestOutput] = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            outputs += llm.step()
    while llm.has_unfinished_requests:
        outputs += llm.step()
    assert tokens(outputs[-1]) == expected and outputs[-1].finished
    settle(llm)


def test_an_interrupt_of_the_bookkeeping_ends_the_engine_with_an_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.enqueue([ids(1), ids(2)], SHORT)
    llm.step()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(books(llm), "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.step()
    for use in (llm.step, llm.wait_for_completion, lambda: ask(llm, 1)):
        with pytest.raises(EngineDeadError, match="a step was broken off: KeyboardInterrupt"):
            use()


# ---- callbacks -----------------------------------------------------------------------------------


def test_an_exception_in_on_progress_aborts_only_that_call(tiny_path: Path) -> None:
    main = threading.current_thread()

    def follow(stage: str, done: int, total: int) -> None:
        if stage == "generate" and threading.current_thread() is main:
            raise ZeroDivisionError

    with LLM(tiny_path, max_model_len=128, on_progress=follow) as llm:
        first, rest = Gate(), Gate(at=20)
        other = Caller(lambda: ask(llm, 1, 2, params=LONG.clone(logits_processors=[first])))
        first.wait()
        first.open()
        with pytest.raises(ZeroDivisionError):
            llm.generate([ids(3), ids(4)], [SHORT, LONG.clone(logits_processors=[rest])])
        rest.open()
        answers = other.get()
        assert [len(answer) for answer in answers] == [100, 100]
        assert rest.calls <= 20
        assert answers == [tokens(o) for o in _collect(llm, [ids(1), ids(2)], LONG)]


def _collect(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
    llm.enqueue(prompts, params)
    return llm.wait_for_completion()


def test_a_slow_logits_processor_delays_but_loses_nothing(tiny: LLM) -> None:
    expected = ask(tiny, 1, 2, 3)
    gate = Gate(at=3)
    slow = Caller(lambda: ask(tiny, 1, params=SHORT.clone(logits_processors=[gate])))
    gate.wait()
    meanwhile = [Caller(lambda seed=seed: ask(tiny, seed)) for seed in (2, 3)]
    stream = tiny.stream(ids(4), LONG)
    stream.close()
    gate.open()
    assert slow.get() == [expected[0]]
    assert [caller.get() for caller in meanwhile] == [[expected[1]], [expected[2]]]
    settle(tiny)


@pytest.mark.parametrize("use", ["generate", "stream", "step", "pump", "wait_for_completion"])
def test_a_logits_processor_that_uses_its_own_engine_is_an_error_of_that_request(
    tiny: LLM, use: str
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: tiny.generate(ids(1), SHORT),
        "stream": lambda: tiny.stream(ids(1), SHORT),
        "step": tiny.step,
        "pump": lambda: tiny.pump(1),
        "wait_for_completion": tiny.wait_for_completion,
    }

    def nested(generated: Any, logits: Any) -> Any:
        calls[use]()
        return logits

    bad, good = tiny.generate([ids(1), ids(2)], [SHORT.clone(logits_processors=[nested]), SHORT])
    assert bad.outputs[0].finish_reason == "error"
    assert "its own step would never end" in str(bad.outputs[0].stop_reason)
    assert len(tokens(good)) == 8
    settle(tiny)


def test_a_logits_processor_may_close_its_engine(tiny_path: Path) -> None:
    llm = LLM(tiny_path, max_model_len=128)
    threads = threading.active_count()

    def close(generated: Any, logits: Any) -> Any:
        llm.close()
        return logits

    caller = Caller(lambda: ask(llm, 1, params=LONG.clone(logits_processors=[close])))
    assert isinstance(caller.get(), EngineClosedError)
    llm.close()
    assert threading.active_count() == threads


def test_a_logits_processor_that_exits_is_an_error_and_not_a_hang(llm: LLM) -> None:
    def leave(generated: Any, logits: Any) -> Any:
        raise SystemExit(1)

    caller = Caller(lambda: ask(llm, 1, params=SHORT.clone(logits_processors=[leave])))
    assert isinstance(caller.get(), EngineDeadError) and "SystemExit" in str(caller.result)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": []}, "tools cannot be set in it"),
        ({"chat_template": "x", "messages": 1}, "chat_template, messages cannot be set in it"),
        ({"add_generation_prompt": True}, "add_generation_prompt cannot be set in it"),
        ([1], "expected a dict with names as keys"),
        ({1: 2}, "expected a dict with names as keys"),
    ],
)
def test_reserved_names_in_chat_template_kwargs_are_refused(
    tiny: LLM, given: Any, message: str
) -> None:
    chat = [{"role": "user", "content": "hello"}]
    template = "{{ messages[0].content }}{{ mood }}"
    with pytest.raises(RequestError, match=message):
        tiny.chat(chat, SHORT, chat_template=template, chat_template_kwargs=given)
    [output] = tiny.chat(
        chat, SHORT, chat_template=template, chat_template_kwargs={"mood": " there"}
    )
    assert "hello there" in str(output.prompt)


# ---- what a request can ask for ------------------------------------------------------------------


def test_a_deadline_keeps_what_was_generated(llm: LLM) -> None:
    [expected] = ask(llm, 1)
    late = 0.0
    books(llm).clock = lambda: time.monotonic() + late
    calls = 0

    def pass_time(generated: Any, logits: Any) -> Any:
        nonlocal late, calls
        calls += 1
        late = 1000.0 if calls == 3 else late
        return logits

    params = LONG.clone(deadline=500.0, logits_processors=[pass_time])
    [output] = llm.generate(ids(1), params)
    assert output.outputs[0].finish_reason == "deadline" and tokens(output) == expected[:3]
    settle(llm)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_an_answer_to_the_end_of_the_context_ends_with_length(
    tiny: LLM, max_tokens: int | None
) -> None:
    [output] = tiny.generate(ids(1, 100), LONG.clone(max_tokens=max_tokens))
    assert len(tokens(output)) == 28 and output.outputs[0].finish_reason == "length"


def test_prefixes_are_found_within_one_salt_and_not_after_a_reset(tiny: LLM) -> None:
    def cached(salt: str | None) -> int | None:
        prompt = ids(77, 40) if salt is None else {**ids(77, 40), "cache_salt": salt}
        [output] = tiny.generate(prompt, SHORT)
        answers.add(tuple(tokens(output)))
        return output.num_cached_tokens

    answers: set[tuple[int, ...]] = set()
    tiny.reset_prefix_cache()
    found = [cached("a"), cached("a"), cached("b"), cached(None), cached(None), cached("b")]
    assert found == [0, 32, 0, 0, 32, 32]
    assert tiny.reset_prefix_cache()
    assert [cached("a"), cached(None), cached("a")] == [0, 0, 32]
    assert len(answers) == 1


def test_priorities_decide_who_runs_first(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, max_num_seqs=1, scheduling_policy="priority") as llm:
        names = llm.enqueue([ids(seed) for seed in range(4)], SHORT, priority=[3, -1, 2, -1])
        finished = []
        while llm.has_unfinished_requests:
            finished += [output.request_id for output in llm.step() if output.finished]
        assert finished == [names[1], names[3], names[2], names[0]]


# ---- threads and loops ---------------------------------------------------------------------------


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
    _until(lambda: len(llm._driver._listeners) == 3)
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
    assert not tiny._driver._awaited and tiny.has_unfinished_requests
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
    _until(lambda: frame.ident in tiny._driver._guests)
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
