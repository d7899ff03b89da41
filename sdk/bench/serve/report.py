"""Reports of runs: text for the terminal, Markdown, JSON."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sdk.bench.serve.runs import Run
from sdk.bench.serve.slo import Slo
from sdk.bench.serve.summary import LATENCIES, Summary
from sdk.bench.serve.sweep import Probe
from sdk.cli.table import format_table

#: More than this between a request's due time and its departure says that the client was too slow.
_LATE_S = 0.01
_PERCENTILES = ("mean", "p50", "p95", "p99", "max")


def _latency(name: str, part: str) -> Callable[[Summary], float | None]:
    def find(summary: Summary) -> float | None:
        found = summary.latencies.get(name)
        return None if found is None else 1000 * float(getattr(found, part))

    return find


#: The columns of a comparison, digits, and where they come from.
_COLUMNS: tuple[tuple[str, int, Callable[[Summary], float | None]], ...] = (
    ("requests/s", 2, lambda summary: summary.request_rate),
    ("tokens/s", 1, lambda summary: summary.output_rate),
    ("TTFT p50 ms", 1, _latency("ttft", "p50")),
    ("TTFT p99 ms", 1, _latency("ttft", "p99")),
    ("ITL p50 ms", 2, _latency("itl", "p50")),
    ("ITL p99 ms", 2, _latency("itl", "p99")),
    ("E2E p50 ms", 1, _latency("e2e", "p50")),
    ("failed", 0, lambda summary: summary.requests - summary.completed),
)


def single(run: Run, slo: Slo | None) -> str:
    """Everything about one run."""
    summary = run.summary
    lines = [f"{run.subject}: {run.case}{'' if run.complete else ' (interrupted)'}"]
    lines.append(
        f"requests    {summary.completed} completed, {summary.requests - summary.completed} "
        f"failed, in {summary.duration_s:.2f} s"
    )
    counted = f"{summary.prompt_rate:.1f} prompt tokens/s"
    if not summary.prompt_tokens:
        counted = "prompt tokens not counted by the server"
    lines.append(
        f"throughput  {summary.request_rate:.2f} requests/s, {summary.output_rate:.1f} generated "
        f"tokens/s, {counted}"
    )
    if slo is not None:
        lines.append(f"goodput     {goodput(summary)} with {slo}")
    if run.client_s is not None:
        pieces = sum(len(record.text) for record in run.records)
        each = f", {1e6 * run.client_s / pieces:.0f} us per piece of text" if pieces else ""
        lines.append(f"client      {run.client_s:.2f} s of CPU time{each}")
    for kind, count in summary.errors.items():
        detail = run.details.get(kind, kind)
        lines.append(f"failed      {count}: {detail[:300]}")
    rows = [
        [
            LATENCIES[name],
            *(f"{1000 * getattr(values, part):.2f}" for part in _PERCENTILES),
        ]
        for name, values in summary.latencies.items()
    ]
    table = format_table(["milliseconds", *_PERCENTILES], rows)
    late = summary.latencies.get("late")
    if late is not None and late.p99 > _LATE_S and run.case.concurrency is None:
        table += (
            "\n\nThe client sent requests late: it had too little CPU time. Latencies include that."
        )
    return "\n".join(lines) + "\n\n" + table


def goodput(summary: Summary) -> str:
    """``"98.0 % (3.9 requests/s; 2 not good: itl 2)"``."""
    assert summary.good is not None
    text = f"{100 * (summary.good_share or 0.0):.1f} % ({summary.good_rate or 0.0:.2f} requests/s"
    if summary.broken:
        kinds = ", ".join(f"{name} {count}" for name, count in summary.broken.items())
        text += f"; {summary.requests - summary.good} not good: {kinds}"
    return text + ")"


def cells(runs: Sequence[Run], slo: Slo | None) -> tuple[list[str], list[list[str]]]:
    """A row for each subject and case: medians of its rounds."""
    head = ["engine", "load", *(name for name, _, _ in _COLUMNS)]
    if slo is not None:
        head.append("good %")
    grouped: dict[tuple[str, str], list[Summary]] = {}
    for run in runs:
        grouped.setdefault((str(run.case), run.subject), []).append(run.summary)
    rows = []
    for (case, subject), summaries in grouped.items():
        row = [subject, case]
        for _, digits, find in _COLUMNS:
            row.append(_median(map(find, summaries), digits))
        if slo is not None:
            row.append(_median((100 * (s.good_share or 0.0) for s in summaries), 1))
        rows.append(row)
    return head, rows


def _median(values: Iterable[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.{digits}f}" if known else ""


def comparison(runs: Sequence[Run], slo: Slo | None) -> str:
    """The table for a terminal, and what failed."""
    head, rows = cells(runs, slo)
    failures = dict.fromkeys(
        f"{run.subject}, {run.case}: {detail[:300]}"
        for run in runs
        for detail in run.details.values()
    )
    return "\n".join([format_table(head, rows, left=2), *failures])


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return format_table(head, rows, left=0)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    marks = ["---", *("---:" for _ in head[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, marks, *rows])


def probe_line(probe: Probe) -> str:
    """One line about one rate of a sweep."""
    summary = probe.summary
    ttft = summary.latencies.get("ttft")
    p99 = "" if ttft is None else f", TTFT p99 {1000 * ttft.p99:.0f} ms"
    return (
        f"{probe.rate:8.3g} per second: {'ok' if probe.passed else 'too fast'}, goodput "
        f"{goodput(summary)}{p99}"
    )


def sweep_cells(probes: Sequence[Probe]) -> tuple[list[str], list[list[str]]]:
    """A row for each rate that was offered, from the lowest."""
    head = ["offered/s", "good %", *(name for name, _, _ in _COLUMNS)]
    rows = []
    for probe in sorted(probes, key=lambda probe: probe.rate):
        summary = probe.summary
        row = [f"{probe.rate:.3g}", f"{100 * (summary.good_share or 0.0):.1f}"]
        row += [_median([find(summary)], digits) for _, digits, find in _COLUMNS]
        rows.append(row)
    return head, rows


def run_json(run: Run) -> dict[str, Any]:
    case: dict[str, Any] = {"rate": run.case.rate, "concurrency": run.case.concurrency}
    cost = {} if run.client_s is None else {"client_cpu_s": round(run.client_s, 6)}
    complete = {"complete": run.complete}
    return {"engine": run.subject, **case, **complete, **run.summary.to_json(), **cost}


def probe_json(probe: Probe) -> Mapping[str, Any]:
    return {"rate": round(probe.rate, 6), "passed": probe.passed, **probe.summary.to_json()}
