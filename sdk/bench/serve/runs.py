"""One run: a case of load against a subject, and its summary."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from sdk.api.errors import SdkError
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.load import LoadGenerator
from sdk.bench.serve.record import Record
from sdk.bench.serve.slo import Slo
from sdk.bench.serve.subjects import Subject
from sdk.bench.serve.summary import Summary, summarize
from sdk.bench.serve.workload import Workload

#: The texts of warm-up requests: those of no run.
_WARM_UP = -1


@dataclass(frozen=True, slots=True)
class Case:
    """How requests arrive: in an open loop (``arrivals``, or the times of the workload's trace), or
    from ``concurrency`` callers. In an open loop ``concurrency`` bounds requests in flight."""

    arrivals: Arrivals | None = None
    concurrency: int | None = None
    trace: bool = False

    @property
    def rate(self) -> float | None:
        return None if self.arrivals is None else self.arrivals.rate

    @property
    def open_loop(self) -> bool:
        return self.trace or self.arrivals is not None

    def __str__(self) -> str:
        most = f", at most {self.concurrency} at a time" if self.concurrency else ""
        if self.arrivals is not None:
            return f"{self.arrivals.rate:.4g} per second{most}"
        if self.trace:
            return f"trace{most}"
        return f"{self.concurrency} at a time"


@dataclass(frozen=True, slots=True)
class Size:
    """How long a run is: a number of sessions (``None``: those of the trace), or seconds in which
    sessions begin; and how many requests warm the subject up first."""

    sessions: int | None = 100
    seconds: float | None = None
    warm_up: int = 4

    def count(self, rate: float) -> int:
        """The number of sessions of an open loop."""
        if self.seconds is not None:
            return max(1, math.ceil(rate * self.seconds))
        return self.sessions or 1


@dataclass(slots=True)
class Run:
    """A run and its results. ``client_s``: CPU time of this process, if it is only the client.
    ``complete``: the run was not interrupted."""

    subject: str
    case: Case
    summary: Summary
    records: list[Record] = field(default_factory=list)
    details: dict[str, str] = field(default_factory=dict)
    client_s: float | None = None
    complete: bool = True


class Runs:
    """Runs cases of one workload; every run gets prompts of its own."""

    def __init__(
        self,
        workload: Workload,
        size: Size,
        slo: Slo | None = None,
        *,
        chat: bool = False,
        timeout_s: float = 600.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._workload = workload
        self._size = size
        self._slo = slo
        self._chat = chat
        self._timeout_s = timeout_s
        self._progress = progress
        self._count = 0

    def warm_up(self, subject: Subject) -> None:
        """Send the first requests, which are not measured.

        :raises SdkError: one fails, so the run would be of no use.
        """
        count = self._size.warm_up
        # Not those of a trace: their prompts would be in the prefix cache when they are measured.
        first = iter(replace(self._workload, trace=()).timed(count, _WARM_UP, None))

        async def run() -> LoadGenerator:
            with subject.connected(chat=self._chat) as target:
                generator = LoadGenerator(target, chat=self._chat, timeout_s=self._timeout_s)
                await generator.closed_loop(first, min(count, 4))
                return generator

        generator = asyncio.run(run())
        for record in generator.records:
            if record.error is not None:
                detail = generator.details.get(record.error, record.error)
                raise SdkError(f"{subject.name}: a first request failed: {detail}")

    def run(self, subject: Subject, case: Case) -> Run:
        """Run one case. After Ctrl-C, the run holds what had ended by then."""
        number, self._count = self._count, self._count + 1
        started: list[LoadGenerator] = []

        async def run() -> None:
            with subject.connected(chat=self._chat) as target:
                generator = LoadGenerator(
                    target,
                    chat=self._chat,
                    timeout_s=self._timeout_s,
                    progress=lambda done: self._progress(f"{subject.name}, {case}: {done} done"),
                )
                started.append(generator)
                await self._send(generator, case, number)

        complete, cpu = True, time.process_time()
        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            if not started:
                raise
            complete = False
        (generator,) = started
        summary = summarize(generator.records, self._slo)
        client_s = time.process_time() - cpu if subject.apart else None
        records, details = generator.records, generator.details
        return Run(subject.name, case, summary, records, details, client_s, complete)

    async def _send(self, generator: LoadGenerator, case: Case, number: int) -> None:
        size, workload = self._size, self._workload
        if case.open_loop:
            count = size.sessions if case.rate is None else size.count(case.rate)
            sessions = workload.timed(count, number, case.arrivals)
            await generator.open_loop(sessions, case.concurrency)
            return
        assert case.concurrency is not None
        count = None if size.seconds is not None else size.sessions
        if count is not None:
            await generator.closed_loop(iter(workload.timed(count, number, None)), case.concurrency)
            return
        await generator.closed_loop(workload.draw(number), case.concurrency, size.seconds)
