"""The benchmark and the search in a model of a card: do they end in time, and with what?

Processes take as long as they would: to start, to compile each kernel that is in nobody's cache,
and to run. Time passes twenty times as fast. The seconds are assumptions, and what is tested is
what the command does with them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Lock
from typing import Any

import pytest

from sdk.api.errors import SdkError
from sdk.bench import gpu
from sdk.bench.gpu import Measuring, choose_rows
from sdk.bench.gpu.rehearsal import Rehearsal
from sdk.bench.gpu.rows import Finding

pytestmark = pytest.mark.slow

SPEED = 20
#: Seconds that ``.ci/gpu.py`` gives this part in call B, and those that it asks it for.
PART, ASKED = 276, 258
ROWS = choose_rows(())
#: Seconds until a process has imported torch and Triton and has a context on the card.
START = 12.0
#: Kernels of a row as ``tests/gpu/aot/predict.py`` lists them, those of loading and of prompts
#: added: with the checks of each weight's first products (two), and prefill.
KERNELS = {
    "w4": 10, "attention": 7, "one-stream": 24, "8b-w4": 30, "requests": 40, "large": 6,
    "fp8": 8, "8b-bf16": 24, "formats": 34, "prefill": 2, "few-heads": 4, "pdl": 24,
    "grouped": 2, "cudnn": 1, "humming": 4,
}  # fmt: skip
#: Seconds of a row whose kernels are compiled: random weights made and packed on the card, results
#: compared, 7 samples of 3 ms each; of engines also graphs captured, about 0.2 s each.
RUN = {
    "limits": 3.0, "w4": 12.0, "attention": 9.0, "one-stream": 8.0, "8b-w4": 14.0,
    "requests": 38.0, "idle": 8.0, "large": 8.0, "fp8": 10.0, "8b-bf16": 12.0,
    "formats": 18.0, "generate": 20.0, "prefill": 4.0, "few-heads": 4.0, "pdl": 10.0, "step": 12.0,
    "grouped": 5.0, "cudnn": 4.0, "humming": 12.0,
}  # fmt: skip


class Machine:
    """A card with a cache of compiled kernels, on a clock that runs faster."""

    def __init__(self, compile_s: float, *, cached: bool = False, crash: str = "") -> None:
        self.compile_s, self.crash = compile_s, crash
        self.cache = {(row, i) for row, n in KERNELS.items() for i in range(n)} if cached else set()
        self._begin = time.monotonic()
        self._lock = Lock()

    def clock(self) -> float:
        return (time.monotonic() - self._begin) * SPEED

    def open(self, known: Any, log: Any, *, rehearsing: bool = False) -> Process:
        return Process(self, rehearsing)

    def missing(self, row: str) -> list[tuple[str, int]]:
        with self._lock:
            return [(row, i) for i in range(KERNELS.get(row, 0)) if (row, i) not in self.cache]

    def compiled(self, kernel: tuple[str, int]) -> None:
        with self._lock:
            self.cache.add(kernel)


class Process:
    """A process that rehearses or measures rows: ``sdk.bench.gpu.process.Worker``."""

    def __init__(self, machine: Machine, rehearsing: bool) -> None:
        self._machine, self._rehearsing = machine, rehearsing
        self._killed = False

    def _pass(self, seconds: float, end: float) -> None:
        """Let time pass. :raises SdkError: the end comes first."""
        left = max(0.0, end - self._machine.clock())
        time.sleep(min(seconds, left) / SPEED)
        if seconds > left or self._killed:
            raise SdkError("took too long and was ended")

    def hello(self, seconds: float) -> dict[str, Any]:
        self._pass(START, self._machine.clock() + seconds)
        return {"device": {"name": "NVIDIA H100 80GB HBM3"}, "tiny": False}

    def answers(self, name: str, seconds: float) -> Iterator[dict[str, Any]]:
        end = self._machine.clock() + seconds
        for kernel in self._machine.missing(name):
            self._pass(self._machine.compile_s, end)
            self._machine.compiled(kernel)
        if name == self._machine.crash:
            raise SdkError("its process ended, exit code -11")
        self._pass(RUN[name] / 3 if self._rehearsing else RUN[name], end)
        yield {"finding": Finding(name, "", 1.0).to_json()}
        yield {"done": None, "lost": False}

    def kill(self) -> None:
        self._killed = True

    def close(self) -> None:
        """Nothing is left."""


def bench(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, str], float]:
    """What ``bench gpu`` does on 16 cores: the note of each row, and seconds."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    rehearsal = Rehearsal(
        ROWS, ASKED * gpu.REHEARSAL_SHARE, None, clock=machine.clock, open_worker=machine.open
    )
    measuring = Measuring(ROWS, ASKED, None, clock=machine.clock, open_worker=machine.open)
    rehearsal.run()
    for _ in measuring.run():
        pass
    notes = {name: found[-1].note for name, found in measuring.report.rows.items()}
    return notes, machine.clock()


#: The last rows, which tell least.
LAST = {"pdl", "grouped", "cudnn", "humming", "step", "generate"}


@pytest.mark.parametrize(
    ("compile_s", "cached", "without"),
    [(1.0, True, set()), (1.0, False, LAST), (2.0, False, {"formats", "prefill", "idle", *LAST})],
    ids=["compiled", "compiling", "compiling slowly"],  # a set has another text in each worker
)
def test_rows_are_measured_in_the_time_of_call_b(
    compile_s: float, cached: bool, without: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All with a cache of compiled kernels; without one, at most the last rows are left out."""
    notes, seconds = bench(Machine(compile_s, cached=cached), monkeypatch)
    assert {name for name, note in notes.items() if note} <= without
    assert seconds < PART


def test_a_row_that_crashes_costs_its_own_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    notes, seconds = bench(Machine(1.0, crash="requests"), monkeypatch)
    assert notes["requests"] == "its process ended, exit code -11"
    assert {name for name, note in notes.items() if note} <= {"requests", *LAST}
    assert seconds < PART


def test_where_compiling_takes_far_too_long_the_first_rows_have_their_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four seconds a kernel: what is worth most comes first, and the call still ends in time."""
    notes, seconds = bench(Machine(4.0), monkeypatch)
    assert seconds < PART
    measured = [name for name, note in notes.items() if not note]
    assert {"limits", "w4", "attention"} <= set(measured)
