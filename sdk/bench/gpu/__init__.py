"""``embedlm bench gpu``: the card's limits, then rows as shares of them or relative to a peer.

Needs torch, triton, transformers, safetensors and numpy, but no installation. First the rows run
in parallel, so that all cores compile their kernels (``rehearsal.py``). Then a separate process
times them one by one. If a row hangs, crashes or takes too long, the report says so, and the next
rows run in a new process. Under ``TRITON_INTERPRET=1`` everything runs with tiny shapes on a CPU:
that tests the code but measures nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sdk import __version__
from sdk.api.errors import RequestError, SdkError
from sdk.api.load_progress import is_terminal
from sdk.bench.gpu.process import NoCard, Worker
from sdk.bench.gpu.rehearsal import Rehearsal
from sdk.bench.gpu.roofline import Prediction, read_predictions
from sdk.bench.gpu.rows import BY_NAME, LIMITS, ROWS, Finding, Row, missing
from sdk.cli.table import format_table

#: Seconds for all rows; starting and stopping add up to nine and a half minutes.
BUDGET = 540
#: Seconds for compiling kernels, and the share of a shorter time; the rows get what is left.
REHEARSAL, REHEARSAL_SHARE = 130.0, 0.35
#: A row with fewer seconds is not started.
_LEAST_S = 5
#: Seconds that a process may take to start, in which it imports torch and opens the card.
_STARTING_S = 30


def choose_rows(names: Sequence[str]) -> list[Row]:
    """The rows with those names in the order of ``ROWS``, the limits first; if none is named, all
    that are usual.

    :raises RequestError: a name is unknown.
    """
    for name in names:
        if name not in BY_NAME:
            raise RequestError(f"--rows: expected names of {', '.join(BY_NAME)}; found {name!r}")
    if not names:
        return [row for row in ROWS if row.usual]
    return [row for row in ROWS if row.name in names or row is LIMITS]


@dataclass
class Report:
    """The results so far."""

    device: dict[str, Any] = field(default_factory=dict)
    tiny: bool = False
    rows: dict[str, list[Finding]] = field(default_factory=dict)
    #: Rows whose kernels were not compiled before they were timed, and why.
    not_rehearsed: dict[str, str] = field(default_factory=dict)

    @property
    def predictions(self) -> Mapping[str, Prediction]:
        """For this card, by what is measured and against what; none of tiny shapes."""
        return {} if self.tiny else read_predictions(str(self.device.get("name", "")))

    @property
    def findings(self) -> list[Finding]:
        return [finding for found in self.rows.values() for finding in found]

    @property
    def compared(self) -> list[tuple[Finding, float, Prediction]]:
        """All measurements of which there is a prediction."""
        predictions = self.predictions
        return [
            (f, f.value, predictions[f.key])
            for f in self.findings
            if f.value is not None and f.key in predictions
        ]

    @property
    def failed(self) -> list[tuple[Finding, float, Prediction]]:
        """The measurements outside the range of their prediction."""
        return [(f, value, p) for f, value, p in self.compared if not p.holds(value)]

    @property
    def measured(self) -> dict[str, float]:
        """All numbers of all rows, by name."""
        return {name: value for f in self.findings for name, value in f.numbers.items()}

    def to_json(self, seconds: float) -> dict[str, Any]:
        return {
            "command": "embedlm bench gpu",
            "embedlm": __version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": self.device,
            "interpreted": self.tiny,
            "seconds": round(seconds, 1),
            "not_rehearsed": self.not_rehearsed,
            "predicted": {name: asdict(found) for name, found in self.predictions.items()},
            "failed_predictions": [f.key for f, _, _ in self.failed],
            "rows": {name: [f.to_json() for f in found] for name, found in self.rows.items()},
        }


class Measuring:
    """Runs rows in workers, within a budget of seconds; ``report`` has the results so far.

    Each row may take its own seconds, or its share of the remaining time if that is more: its
    seconds in proportion to those of later rows. So a row that hangs takes no time from the others
    where all have theirs; where the time is short, earlier rows are worth more than later ones.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        budget: float,
        log: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        open_worker: Callable[..., Any] = Worker,
    ) -> None:
        self.report = Report()
        self._rows = rows
        self._end = clock() + budget
        self._log = log
        self._clock = clock
        self._open_worker = open_worker
        self._worker: Any = None

    def run(self) -> Iterator[Row]:
        """Yield every row once it is done. :raises NoCard: no GPU, before anything was measured."""
        try:
            for number, row in enumerate(self._rows):
                self.report.rows[row.name] = []
                needed = sum(later.seconds for later in self._rows[number:])
                left = max(0.0, self._end - self._clock())
                share = left * row.seconds / max(needed, 1)
                self._row(row, min(left, max(share, row.seconds)))
                yield row
        finally:
            self._drop()

    def _row(self, row: Row, seconds: float) -> None:
        found = self.report.rows[row.name]
        if seconds < min(row.seconds, _LEAST_S):
            found.append(missing(row, f"no time left: {seconds:.0f} s of the budget"))
            return
        try:
            # a new process takes ten seconds to start; the row that gets it has its time after that
            worker = self._opened(min(max(seconds, _STARTING_S), self._end - self._clock()))
            end = min(self._clock() + seconds, self._end)
            for answer in worker.answers(row.name, end - self._clock()):
                if "finding" in answer:
                    found.append(Finding(**answer["finding"]))
                elif answer["done"] is not None:
                    found.append(missing(row, answer["done"]))
            if answer["lost"]:
                self._drop()
        except SdkError as error:
            if isinstance(error, NoCard) and not self.report.device:
                raise  # later it means that the card was lost
            found.append(missing(row, str(error)))
            self._drop()

    def _opened(self, seconds: float) -> Any:
        if self._worker is None:
            self._worker = self._open_worker(self.report.measured, self._log)
            hello = self._worker.hello(seconds)
            self.report.device, self.report.tiny = hello["device"], hello["tiny"]
        return self._worker

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def to_text(report: Report) -> str:
    """The device and the table, short enough for a screen, and which predictions failed."""
    device = ", ".join(f"{name} {value}" for name, value in report.device.items())
    lines = [device]
    if report.tiny:
        lines.append("interpreted, tiny shapes: this shows that everything runs, not how fast")
    head, rows = _table(report)
    lines += ["", format_table(head, rows, left=2)]
    if report.compared:
        lines += ["", _verdict(report), *(f"  {line}" for line in _failed(report))]
    return "\n".join(lines)


def to_markdown(report: Report) -> str:
    """For docs/bench/benchmarks.md."""
    head, rows = _table(report)
    marks = ["---", "---", *["---:"] * (len(head) - 3), "---"]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [head, marks, *rows])
    date = time.strftime("%Y-%m-%d", time.gmtime())
    device = ", ".join(f"{name} {value}" for name, value in report.device.items())
    lines = [f"```bash\nembedlm bench gpu\n```\n\n{date}; {device}.\n\n{table}"]
    if report.compared:
        lines += ["", _verdict(report), *(f"- {line}" for line in _failed(report))]
    return "\n".join(lines) + "\n"


def _verdict(report: Report) -> str:
    failed = len(report.failed)
    return f"{failed} of {len(report.compared)} predictions failed{':' if failed else '.'}"


def _failed(report: Report) -> list[str]:
    return [
        f"{f.what}, {f.against or f.unit}: measured {value:.3g}, predicted {predicted}"
        for f, value, predicted in report.failed
    ]


def _table(report: Report) -> tuple[list[str], list[list[str]]]:
    """The head and the rows. ``predicted``: by the model of ``roofline.py``, with its range;
    ``of it``: the measurement as a multiple of the prediction."""
    predictions = report.predictions
    head = ["measured", "against", "value", "predicted", "of it", "floor", "goal", ""]
    rows = []
    for f in report.findings:
        predicted = predictions.get(f.key)
        of_it = f"{predicted.ratio(f.value):.2f}" if predicted and f.value is not None else ""
        cells = _cells(f, report.tiny)
        text = "" if predicted is None else str(predicted)
        rows.append([*cells[:3], text, of_it, *cells[3:]])
    return head, rows


def _cells(f: Finding, tiny: bool) -> list[str]:
    if f.value is None:
        return [f.what, f.against, "-", "", "", f.note]
    asked = ["" if x is None else f"{x:g}" for x in (f.floor, f.goal)]
    if tiny:
        return [f.what, f.against, "runs", *asked, ""]
    return [f.what, f.against, f"{f.value:.3g} {f.unit}", *asked, f.verdict]


def run(args: argparse.Namespace) -> int:
    """See :mod:`sdk.bench`. Exit code 2 without a GPU, 130 after Ctrl-C (with results)."""
    begin = time.monotonic()
    rows = choose_rows(args.rows.split(",") if args.rows else ())
    code, budget = 0, args.seconds or BUDGET
    compiling = min(REHEARSAL, budget * REHEARSAL_SHARE)
    with open(args.log or os.devnull, "w") as log:
        rehearsal = Rehearsal(rows, compiling, log)
        measuring = Measuring(rows, budget, log)
        measuring.report.not_rehearsed = rehearsal.left_out
        try:
            rehearsal.run()
            if is_terminal(sys.stderr):
                print(f"compiled: {time.monotonic() - begin:.0f} s", file=sys.stderr)
            for row in measuring.run():
                if is_terminal(sys.stderr):
                    print(f"{row.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
                _write(args, measuring.report, begin)
        except KeyboardInterrupt:
            code = 130
    _write(args, measuring.report, begin)
    report = measuring.report.to_json(time.monotonic() - begin)
    print(json.dumps(report, indent=2) if args.json == "-" else to_text(measuring.report))
    return code


def _write(args: argparse.Namespace, report: Report, begin: float) -> None:
    """Write the results after every row, so that they stay however the command ends."""
    if args.json and args.json != "-":
        data = json.dumps(report.to_json(time.monotonic() - begin), indent=2)
        _replace(Path(args.json), data + "\n")
    if args.markdown:
        _replace(Path(args.markdown), to_markdown(report))


def _replace(path: Path, text: str) -> None:
    """In one step: a command that is killed leaves the results of the rows before."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)
