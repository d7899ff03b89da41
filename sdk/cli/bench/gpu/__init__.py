"""``embedlm bench gpu``: the card's limits, then every row as a share of them or beside a peer.

Needs torch, triton, transformers, safetensors and numpy, no installation. The rows run in a process
of their own: one that hangs, crashes or takes too long is a row that says so, and the next ones go
on in a new process. Under ``TRITON_INTERPRET=1`` everything runs with tiny shapes on a CPU, which
shows that it runs and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

from sdk import __version__
from sdk.cli.bench.engines import own_environment
from sdk.cli.bench.gpu.rows import BY_NAME, LIMITS, ROWS, Finding, Row, missing
from sdk.cli.table import format_table
from sdk.errors import RequestError, SdkError

#: Seconds for all rows; eight minutes with what starting and stopping takes.
BUDGET = 450
#: Of a worker that imports torch and finds the card.
_START_S = 90


def choose_rows(names: Sequence[str]) -> list[Row]:
    """The rows of those names, in their order, the limits first; all where none is named.

    :raises RequestError: for a name that is none.
    """
    for name in names:
        if name not in BY_NAME:
            raise RequestError(f"--rows: expected names of {', '.join(BY_NAME)}; found {name!r}")
    return [row for row in ROWS if not names or row.name in names or row is LIMITS]


@dataclass
class Report:
    """What was found so far."""

    device: dict[str, Any] = field(default_factory=dict)
    tiny: bool = False
    rows: dict[str, list[Finding]] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, float]:
        """Every number by its name, of all rows."""
        findings = [finding for found in self.rows.values() for finding in found]
        return {name: value for f in findings for name, value in f.numbers.items()}

    def to_json(self, seconds: float) -> dict[str, Any]:
        return {
            "command": "embedlm bench gpu",
            "embedlm": __version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": self.device,
            "interpreted": self.tiny,
            "seconds": round(seconds, 1),
            "rows": {name: [f.to_json() for f in found] for name, found in self.rows.items()},
        }


class NoCard(RequestError):
    """There is no GPU that the kernels run on."""


class Worker:
    """The process that measures. See ``worker.py`` for what is said."""

    def __init__(self, measured: dict[str, float], log: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sdk.cli.bench.gpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=own_environment(),
            start_new_session=True,  # Ctrl-C reaches this process, which ends the other
        )
        self._lines: Queue[str] = Queue()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()
        self._say(json.dumps({"measured": measured}))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended, which its answer says
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def hello(self, seconds: float) -> dict[str, Any]:
        """:raises NoCard: without a GPU. :raises SdkError: when the process ends or hangs."""
        found = self._answer(time.monotonic() + seconds)
        if "no_card" in found:
            raise NoCard(f"bench gpu: {found['no_card']}")
        return found

    def answers(self, name: str, seconds: float) -> Iterator[dict[str, Any]]:
        """Of one row, its end included. :raises SdkError: when the process ends or hangs."""
        end = time.monotonic() + seconds
        self._say(name)
        answer: dict[str, Any] = {}
        while "done" not in answer:
            answer = self._answer(end)
            yield answer

    def _answer(self, end: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            raise SdkError("took too long and was ended") from None
        if not line:
            raise SdkError(f"its process ended, exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End the process and those it started, whatever they do."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


class Measuring:
    """Runs rows in workers, within a budget of seconds; ``report`` has what there is so far."""

    def __init__(self, rows: Sequence[Row], budget: float, log: Any) -> None:
        self.report = Report()
        self._rows = rows
        self._end = time.monotonic() + budget
        self._log = log
        self._worker: Worker | None = None

    def run(self) -> Iterator[Row]:
        """Every row once it is done. :raises NoCard: before the first, without a GPU."""
        try:
            for row in self._rows:
                self.report.rows[row.name] = []
                self._row(row)
                yield row
        finally:
            self._drop()

    def _row(self, row: Row) -> None:
        found = self.report.rows[row.name]
        left = self._end - time.monotonic()
        if left < min(row.seconds, 20):
            found.append(missing(row, f"no time left: {max(left, 0):.0f} s of the budget"))
            return
        try:
            for answer in self._opened().answers(row.name, min(row.seconds, left)):
                if "finding" in answer:
                    found.append(Finding(**answer["finding"]))
                elif answer["done"] is not None:
                    found.append(missing(row, answer["done"]))
            if answer["lost"]:
                self._drop()
        except SdkError as error:
            if isinstance(error, NoCard):
                raise
            found.append(missing(row, str(error)))
            self._drop()

    def _opened(self) -> Worker:
        if self._worker is None:
            self._worker = Worker(self.report.measured, self._log)
            hello = self._worker.hello(_START_S)
            self.report.device, self.report.tiny = hello["device"], hello["tiny"]
        return self._worker

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def to_text(report: Report) -> str:
    """The table, short enough to be the last thing on a screen."""
    device = ", ".join(f"{name} {value}" for name, value in report.device.items())
    lines = [device]
    if report.tiny:
        lines.append("interpreted, tiny shapes: this shows that everything runs, not how fast")
    rows = [_cells(f, report.tiny) for found in report.rows.values() for f in found]
    head = ["measured", "against", "value", "floor", "goal", ""]
    return "\n".join(lines) + "\n\n" + format_table(head, rows, left=2)


def to_markdown(report: Report) -> str:
    """For docs/benchmarks.md."""
    rows = [_cells(f, report.tiny) for found in report.rows.values() for f in found]
    head = ["measured", "against", "value", "floor", "goal", ""]
    marks = ["---", "---", "---:", "---:", "---:", "---"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, marks, *rows])
    date = time.strftime("%Y-%m-%d", time.gmtime())
    device = ", ".join(f"{name} {value}" for name, value in report.device.items())
    return f"```bash\nembedlm bench gpu\n```\n\n{date}; {device}.\n\n{table}\n"


def _cells(f: Finding, tiny: bool) -> list[str]:
    if f.value is None:
        return [f.what, f.against, "-", "", "", f.note]
    asked = ["" if x is None else f"{x:g}" for x in (f.floor, f.goal)]
    if tiny:
        return [f.what, f.against, "runs", *asked, ""]
    return [f.what, f.against, f"{f.value:.3g} {f.unit}", *asked, f.verdict]


def run(args: argparse.Namespace) -> int:
    """See :mod:`sdk.cli.bench`. Exit code 2 without a GPU, 130 after Ctrl-C, with what there is."""
    begin = time.monotonic()
    rows = choose_rows(args.rows.split(",") if args.rows else ())
    code = 0
    with open(args.log or os.devnull, "w") as log:
        measuring = Measuring(rows, args.seconds or BUDGET, log)
        try:
            for row in measuring.run():
                if sys.stderr.isatty():
                    print(f"{row.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
                _write(args, measuring.report, begin)
        except KeyboardInterrupt:
            code = 130
    _write(args, measuring.report, begin)
    report = measuring.report.to_json(time.monotonic() - begin)
    print(json.dumps(report, indent=2) if args.json == "-" else to_text(measuring.report))
    return code


def _write(args: argparse.Namespace, report: Report, begin: float) -> None:
    """After every row: whatever ends the command leaves what was measured."""
    if args.json and args.json != "-":
        data = json.dumps(report.to_json(time.monotonic() - begin), indent=2)
        Path(args.json).write_text(data + "\n")
    if args.markdown:
        Path(args.markdown).write_text(to_markdown(report))
