"""The load generator: open and closed loops, conversations, failures, and real targets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from sdk.api.errors import RequestError, SdkError
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.http_connection import Address
from sdk.bench.serve.lengths import parse_lengths
from sdk.bench.serve.load import LoadGenerator, Prompt, RequestFailed
from sdk.bench.serve.record import Record
from sdk.bench.serve.runs import Case, Run, Runs, Size
from sdk.bench.serve.servers import server_at
from sdk.bench.serve.slo import Slo
from sdk.bench.serve.subjects import OwnEngine, Subject
from sdk.bench.serve.workload import Session, Turn, Workload
from sdk.testing import FakeAnswer, FakeLLM
from tests.bench.serve.fake_server import (
    DONE,
    HEAD,
    Asked,
    FakeServer,
    answer,
    chunk,
    event,
    running,
)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it waits: sleeping takes no time, and times are exact."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Slow:
    """Answers with two words, after ``first`` seconds and ``gap`` seconds later."""

    def __init__(self, loop: VirtualLoop, first: float, gap: float = 0.0) -> None:
        self.loop, self.first, self.gap = loop, first, gap
        self.asked: list[tuple[float, Prompt]] = []
        self.running = self.most = 0

    async def ask(self, prompt: Prompt, output_len: int, record: Record) -> None:
        record.sent = self.loop.time()
        self.asked.append((record.sent, prompt))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.first)
            if output_len == 13:
                raise RequestFailed("unlucky", "13")
            record.add(self.loop.time(), "x")
            await asyncio.sleep(self.gap)
            record.add(self.loop.time(), "y")
            record.output_tokens = 2
        finally:
            self.running -= 1


def session(at: float, *lengths: int, think_s: float = 0.0) -> Session:
    turns = tuple(Turn(f"q{number}", length) for number, length in enumerate(lengths or (2,)))
    return Session(at, (), turns, think_s)


def virtually(
    use: Callable[[LoadGenerator], Coroutine[Any, Any, None]],
    first: float,
    gap: float = 0.0,
    **options: Any,
) -> tuple[LoadGenerator, Slow]:
    """Use a generator in virtual time."""
    loop = VirtualLoop()
    target = Slow(loop, first, gap)
    generator = LoadGenerator(target, clock=loop.time, **options)
    try:
        loop.run_until_complete(use(generator))
    finally:
        loop.close()
    return generator, target


def test_an_open_loop_does_not_wait_for_answers() -> None:
    sessions = [session(at) for at in (2.0, 0.0, 1.0)]
    generator, target = virtually(lambda g: g.open_loop(sessions), 5.0, 1.0)
    assert [at for at, _ in target.asked] == [0.0, 1.0, 2.0]
    assert [(r.due, r.ttft, r.e2e) for r in generator.records] == [
        (0.0, 5.0, 6.0),
        (1.0, 5.0, 6.0),
        (2.0, 5.0, 6.0),
    ]


def test_waiting_for_a_slot_counts_as_latency() -> None:
    sessions = [session(0.0), session(1.0), session(1.5)]
    generator, target = virtually(lambda g: g.open_loop(sessions, 1), 4.0)
    assert target.most == 1
    assert [at for at, _ in target.asked] == [0.0, 4.0, 8.0]
    assert [record.ttft for record in generator.records] == [4.0, 7.0, 10.5]
    assert [record.sent - record.due for record in generator.records] == [0.0, 3.0, 6.5]


def test_a_closed_loop_has_as_many_requests_as_callers() -> None:
    sessions = [session(0.0) for _ in range(7)]
    generator, target = virtually(lambda g: g.closed_loop(iter(sessions), 3), 2.0)
    assert target.most == 3
    assert [at for at, _ in target.asked] == [0.0] * 3 + [2.0] * 3 + [4.0]
    assert all(record.ttft == 2.0 for record in generator.records)


def test_a_closed_loop_ends_after_its_seconds() -> None:
    endless = (session(0.0) for _ in iter(int, 1))
    generator, _ = virtually(lambda g: g.closed_loop(endless, 2, 5.0), 2.0)
    assert len(generator.records) == 6  # those that begin at 0, 2 and 4


def test_the_next_turn_of_a_conversation_contains_the_answer_and_waits_for_the_reader() -> None:
    sessions = [session(1.0, 2, 2, think_s=3.0)]
    generator, target = virtually(lambda g: g.open_loop(sessions), 2.0, chat=True)
    (_, first), (at, second) = target.asked
    assert first == [{"role": "user", "content": "q0"}]
    assert second == [
        {"role": "user", "content": "q0"},
        {"role": "assistant", "content": "xy"},
        {"role": "user", "content": "q1"},
    ]
    assert at == 6.0  # arrived at 1, answered at 3, read until 6
    assert [(record.due, record.ttft) for record in generator.records] == [(1.0, 2.0), (6.0, 2.0)]


def test_a_failed_turn_ends_its_conversation_only() -> None:
    sessions = [session(0.0, 13, 2), session(0.0, 2, 2)]
    generator, target = virtually(lambda g: g.open_loop(sessions), 1.0)
    assert [record.error for record in generator.records] == ["unlucky", None, None]
    assert generator.details == {"unlucky": "unlucky: 13"}
    assert len(target.asked) == 3


def test_a_request_that_takes_too_long_has_failed_from_when_it_was_due() -> None:
    sessions = [session(0.0), session(0.0)]
    generator, target = virtually(lambda g: g.open_loop(sessions, 1), 4.0, timeout_s=6.0)
    assert [record.error for record in generator.records] == [None, "timeout"]
    assert generator.records[1].last == 6.0
    assert target.running == 0


def test_progress_counts_ended_requests() -> None:
    seen: list[int] = []
    virtually(lambda g: g.open_loop([session(0.0), session(0.0, 13)]), 1.0, progress=seen.append)
    assert seen == [1, 2]


LENGTHS = parse_lengths("4")
WORKLOAD = Workload(input_len=parse_lengths("6"), output_len=LENGTHS)


def measure(subject: Subject, case: Case, workload: Workload = WORKLOAD, **options: Any) -> Run:
    size = options.pop("size", Size(5))
    runs = Runs(workload, size, options.pop("slo", None), **options)
    runs.warm_up(subject)
    return runs.run(subject, case)


def http(server: FakeServer) -> Subject:
    return server_at("fake", Address.parse(server.url), None, {}, {})


CASES = [Case(concurrency=2), Case(Arrivals(100.0)), Case(Arrivals(100.0), concurrency=1)]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("chat", [False, True])
def test_an_engine_and_a_server_are_measured_alike(case: Case, chat: bool) -> None:
    with FakeLLM("one two three four five six", max_num_seqs=4) as llm:
        inside = measure(OwnEngine("fake", llm), case, chat=chat, slo=Slo(ttft=60.0))
    with running(FakeServer()) as server:
        outside = measure(http(server), case, chat=chat, slo=Slo(ttft=60.0))
    for run in (inside, outside):
        summary = run.summary
        assert (summary.requests, summary.completed, summary.good) == (5, 5, 5)
        assert summary.output_tokens == 20 and summary.latencies["itl"].count == 15
        assert summary.latencies["ttft"].mean > 0 and summary.duration_s > 0
        assert run.complete and not run.details
    assert outside.summary.prompt_tokens == 30
    assert inside.summary.prompt_tokens >= 30  # a chat has words of its template, too
    assert inside.summary.latencies["queue"].count == 5
    assert "queue" not in outside.summary.latencies
    warm, *measured = [one.body for one in server.questions][3:]
    key = "messages" if chat else "prompt"
    assert len(measured) == 5 and len({str(body[key]) for body in [warm, *measured]}) == 6


def test_a_closed_loop_over_http_keeps_its_connections() -> None:
    with running(FakeServer(delay_s=0.002)) as server:
        run = measure(http(server), Case(concurrency=3), size=Size(12, warm_up=0))
    assert run.summary.completed == 12
    assert server.most_running == 3
    assert server.connections == 1 + 3  # one asked for the model


def test_a_slow_server_delays_only_what_it_answers() -> None:
    with running(FakeServer(delay_s=0.05)) as server:
        run = measure(http(server), Case(Arrivals(200.0)), size=Size(10, warm_up=0))
    summary = run.summary
    assert server.most_running > 1
    assert summary.latencies["ttft"].p50 >= 0.05 and summary.latencies["itl"].p50 >= 0.04
    assert summary.latencies["e2e"].p50 >= 0.2


def test_failures_are_counted_by_kind_and_do_not_stop_the_others() -> None:
    hung_up: list[int] = []

    async def behave(server: FakeServer, asked: Asked, writer: asyncio.StreamWriter) -> None:
        number = len(server.questions)
        if number == 2:
            writer.write(b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\nfull")
        elif number == 3:
            writer.write(HEAD + chunk(event("half")))
            await writer.drain()
            writer.close()
        elif number == 4:
            writer.write(HEAD + chunk(event("half") + DONE)[:20])
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                hung_up.append(number)
        else:
            await answer(server, asked, writer)

    with running(FakeServer(behave)) as server:
        run = measure(
            http(server),
            Case(concurrency=1),
            size=Size(6, warm_up=0),
            timeout_s=5.0,
            slo=Slo(e2e=60.0),
        )
    summary = run.summary
    assert summary.errors == {"HTTP 503": 1, "disconnected": 1, "timeout": 1}
    assert (summary.completed, summary.good, summary.broken) == (3, 3, {"error": 3})
    assert run.details["HTTP 503"] == "HTTP 503: full"
    assert hung_up == [4]  # the client hangs up when it gives up


def test_errors_of_an_engine_are_counted_by_kind() -> None:
    answers = [
        "a b c d",
        FakeAnswer("half an", error=ValueError("NaN")),
        RequestError("prompt: too long"),
        "a b c d",
    ]
    with FakeLLM(answers) as llm:
        run = measure(OwnEngine("fake", llm), Case(concurrency=1), size=Size(4, warm_up=0))
    assert run.summary.errors == {"finish reason error": 1, "RequestError": 1}
    assert run.details["RequestError"] == "RequestError: prompt: too long"
    assert "NaN" in run.details["finish reason error"]


def test_a_failing_warm_up_stops_before_anything_is_measured() -> None:
    with FakeLLM(errors={0: RequestError("no such thing")}) as llm:
        runs = Runs(WORKLOAD, Size(5))
        with pytest.raises(SdkError, match="fake: a first request failed: RequestError: no such"):
            runs.warm_up(OwnEngine("fake", llm))


def test_the_prompts_of_a_trace_are_not_those_of_the_warm_up() -> None:
    trace = (session(0.0, 3), session(0.01, 3))
    with FakeLLM("a b c") as llm:
        workload = replace(WORKLOAD, trace=trace)
        run = measure(OwnEngine("fake", llm), Case(trace=True), workload, size=Size(None))
        asked = [one.prompt for one in llm.requests]
    assert run.summary.completed == 2
    assert len(asked) == 6 and asked[4:] == ["q0", "q0"] and "q0" not in asked[:4]


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_keeps_what_has_ended() -> None:
    async def behave(server: FakeServer, asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(server.questions) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(30)
        await answer(server, asked, writer)

    with running(FakeServer(behave)) as server:
        run = measure(http(server), Case(concurrency=1), size=Size(9, warm_up=0))
    assert not run.complete
    assert run.summary.completed == 2 and run.summary.errors == {}
