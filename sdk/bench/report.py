"""Results, and their output as a table for the terminal, Markdown and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdk.bench.engines import OURS
from sdk.cli.table import format_table


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity: its column and digits. ``ratio`` adds ours divided by the peer's, for
    our row of the same case.
    """

    key: str
    heading: str
    digits: int = 1
    ratio: bool = True


@dataclass(slots=True)
class Result:
    """All samples of one engine in one case, such as ``{"requests": 8}``."""

    engine: str
    name: str
    kv: str
    case: Mapping[str, int | str]
    samples: dict[str, list[float]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for key, value in values.items():
            self.samples.setdefault(key, []).append(value)

    def median(self, key: str) -> float:
        return statistics.median(self.samples[key])

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.name,
            "kv": self.kv,
            **self.case,
            "median": {key: round(self.median(key), 6) for key in self.samples},
            "samples": {
                key: [round(value, 6) for value in values] for key, values in self.samples.items()
            },
        }


@dataclass(frozen=True, slots=True)
class Section:
    """One suite's results, with a title and a note for readers."""

    title: str
    note: str
    metrics: Sequence[Metric]
    results: Sequence[Result]


def ratio(result: Result, results: Iterable[Result], key: str) -> float | None:
    """Our median divided by this peer's in the same case; ``None`` for our own rows."""
    if result.engine == OURS or not result.median(key):
        return None
    for other in results:
        if other.engine == OURS and other.case == result.case:
            return other.median(key) / result.median(key)
    return None


def cells(section: Section) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; ratio columns only if a peer was measured."""
    results = section.results
    compared = any(result.engine != OURS for result in results)
    cases = list(results[0].case) if results else []
    head = ["engine", "KV", *cases]
    for metric in section.metrics:
        head.append(metric.heading)
        if metric.ratio and compared:
            head.append("embedlm / it")
    rows = []
    for result in results:
        row = [result.name, result.kv, *(str(result.case[name]) for name in cases)]
        for metric in section.metrics:
            known = metric.key in result.samples  # not every engine tells everything
            row.append(f"{result.median(metric.key):.{metric.digits}f}" if known else "")
            if metric.ratio and compared:
                found = ratio(result, results, metric.key)
                row.append("" if found is None else f"{found:.2f}")
        rows.append(row)
    return head, rows


def heading(report: Mapping[str, Any]) -> str:
    """The machine and the run, in three lines."""
    machine, settings = report["machine"], report["settings"]
    read, peak = machine["read_gb_per_s"], machine["int8_tops"]
    apart, core_to_core = machine["core_to_core_ns"], ""
    if apart["before"] is not None:
        core_to_core = f"; core to core {apart['before']:.0f} ns before, {apart['after']:.0f} after"
    return (
        f"{report['model']}, {settings['threads']} threads, median of {settings['rounds']} rounds, "
        f"engines in turn\n"
        f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['simd']}; Python {machine['python']}\n"
        f"memory read {read['before']:.1f} GB/s before, {read['after']:.1f} after; "
        f"8-bit integer peak {peak['before']:.2f} TOPS before, {peak['after']:.2f} after"
        f"{core_to_core}"
    )


def to_text(report: Mapping[str, Any], sections: Iterable[Section]) -> str:
    parts = [heading(report)]
    for section in sections:
        head, rows = cells(section)
        parts.append(f"{section.title}: {section.note}\n\n{format_table(head, rows)}")
    parts += [f"Not measured: {failure}" for failure in report["failures"]]
    return "\n\n".join(parts)


def to_markdown(report: Mapping[str, Any], sections: Iterable[Section]) -> str:
    """All tables with their titles, and the command that repeats the run."""
    parts = [f"```bash\n{report['command']}\n```", heading(report).replace("\n", "; ") + "."]
    for section in sections:
        head, rows = cells(section)
        marks = ["---" if i == 0 else "---:" for i in range(len(head))]
        table = "\n".join(f"| {' | '.join(row)} |" for row in [head, marks, *rows])
        parts.append(f"**{section.title}**: {section.note}\n\n{table}")
    parts += [f"Not measured: `{failure}`" for failure in report["failures"]]
    return "\n\n".join(parts) + "\n"
