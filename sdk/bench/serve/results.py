"""The results of a command: measured in turn, printed and written to files."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sdk import __version__
from sdk.api.errors import SdkError
from sdk.api.load_progress import is_terminal
from sdk.bench.serve import report
from sdk.bench.serve.options import arrivals_of
from sdk.bench.serve.plots import write_plots
from sdk.bench.serve.progress import ProgressLine
from sdk.bench.serve.runs import Case, Run, Runs
from sdk.bench.serve.subjects import Subject
from sdk.bench.serve.summary import Summary
from sdk.bench.serve.sweep import FIRST_RATE, Probe, sweep
from sdk.kernels.system import SYSTEM


class Results:
    """The runs of ``embedlm bench serve``, and of a sweep the rates found, by engine."""

    def __init__(self, args: argparse.Namespace, line: ProgressLine) -> None:
        self.runs: list[Run] = []
        self.interrupted = False
        self._args = args
        self._line = line
        self._load = [os.getloadavg()[0]]
        self._sweeps: dict[str, tuple[float, list[Probe]]] = {}

    def measure(self, subjects: Sequence[Subject], cases: Sequence[Case], runs: Runs) -> None:
        """Every case on every subject, in rounds; every other round in reverse."""
        for number in range(self._args.rounds):
            for case in cases:
                for subject in subjects if number % 2 == 0 else subjects[::-1]:
                    self._add(runs.run(subject, case))

    def sweep(self, subjects: Sequence[Subject], runs: Runs) -> None:
        """The highest rate of every subject."""
        limit = self._args.concurrency[0] if self._args.concurrency else None
        for subject in subjects:

            def offer(rate: float, subject: Subject = subject) -> Summary:
                case = Case(arrivals_of(self._args, rate), limit)
                return self._add(runs.run(subject, case)).summary

            self._sweeps[subject.name] = sweep(
                offer, self._args.goodput, first=FIRST_RATE, report=self._say
            )

    def _add(self, run: Run) -> Run:
        if run.records or run.complete:
            self.runs.append(run)
        if not run.complete:
            raise KeyboardInterrupt
        if run.summary.completed == 0:
            kinds = "; ".join(run.details.get(kind, kind) for kind in run.summary.errors)
            raise SdkError(f"{run.subject}, {run.case}: all requests failed: {kinds[:500]}")
        return run

    def _say(self, probe: Probe) -> None:
        if is_terminal(sys.stderr):
            self._line.clear()
            print(report.probe_line(probe), file=sys.stderr)

    def write(self) -> None:
        """Files first, then the table (or JSON) on standard output."""
        args = self._args
        self._load.append(os.getloadavg()[0])
        data = json.dumps(self._to_json(), indent=2)
        if args.json and args.json != "-":
            Path(args.json).write_text(data + "\n")
        if args.markdown:
            Path(args.markdown).write_text(self._to_markdown())
        if args.records:
            self._write_records(Path(args.records))
        if args.plots:
            write_plots(Path(args.plots), self.runs, swept=bool(self._sweeps))
        print(data if args.json == "-" else self._to_text())

    def _to_text(self) -> str:
        args = self._args
        if self._sweeps:
            parts = []
            for name, (rate, probes) in self._sweeps.items():
                parts += [self._found(name, rate), report.text_table(*report.sweep_cells(probes))]
            return "\n\n".join(parts)
        if len(self.runs) == 1:
            return report.single(self.runs[0], args.slo)
        return report.comparison(self.runs, args.slo)

    def _found(self, name: str, rate: float) -> str:
        share = f"{100 * self._args.goodput:g} % of the requests keep {self._args.slo}"
        if not rate:
            return f"{name}: there is no rate at which {share}"
        return f"{name}: up to {rate:.3g} per second {share}"

    def _to_markdown(self) -> str:
        machine = self._machine()
        before, after = machine["load_average"].values()
        parts = [
            f"```bash\n{command(self._args)}\n```",
            f"{machine['cpu']}, {machine['cpus']} CPUs; Python {machine['python']}; load average "
            f"{before:.1f} before, {after:.1f} after.",
        ]
        for name, (rate, probes) in self._sweeps.items():
            parts += [
                f"{self._found(name, rate)}.",
                report.markdown_table(*report.sweep_cells(probes)),
            ]
        if not self._sweeps:
            parts.append(report.markdown_table(*report.cells(self.runs, self._args.slo)))
        return "\n\n".join(parts) + "\n"

    def _to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "command": command(self._args),
            "embedlm": __version__,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": self._machine(),
            "slo": None if self._args.slo is None else str(self._args.slo),
            "interrupted": self.interrupted,
            "runs": [report.run_json(run) for run in self.runs],
        }
        if self._sweeps:
            found["sweeps"] = {
                name: {"rate": round(rate, 6), "probes": [report.probe_json(p) for p in probes]}
                for name, (rate, probes) in self._sweeps.items()
            }
        return found

    def _machine(self) -> dict[str, Any]:
        return {
            "cpu": SYSTEM.cpu_name(),
            "cpus": SYSTEM.num_cpus(),
            "python": platform.python_version(),
            "load_average": {"before": self._load[0], "after": self._load[-1]},
        }

    def _write_records(self, path: Path) -> None:
        with path.open("w") as file:
            for number, run in enumerate(self.runs):
                begin = min((record.due for record in run.records), default=0.0)
                for record in run.records:
                    entry = {"run": number, "engine": run.subject, **record.to_json(begin)}
                    file.write(json.dumps(entry) + "\n")


#: Options that say where results go, and such as hold paths, hosts or keys.
_LEFT_OUT = ("command", "run", "verbose", "json", "markdown", "plots", "records", "header")


def command(args: argparse.Namespace) -> str:
    """The command line that repeats the run, without local paths."""
    from sdk.cli import build_parser

    words = ["embedlm", "bench", "serve"]
    if args.model:
        words.append(Path(args.model).name)
    defaults = vars(build_parser("bench serve").parse_args(["bench serve"]))
    for option, default in defaults.items():
        value = getattr(args, option)
        if option in (*_LEFT_OUT, "model") or value == default:
            continue
        words.append(f"--{option.replace('_', '-')}")
        if option == "against":
            words.append(",".join(peer.engine for peer in value))
        elif option in ("trace", "options"):
            words.append(Path(value).name)
        elif isinstance(value, dict):
            words.append(json.dumps(value))
        elif isinstance(value, tuple):
            words.append(",".join(f"{one:g}" for one in value))
        elif value is not True:
            words.append(str(value))
    return shlex.join(words)
