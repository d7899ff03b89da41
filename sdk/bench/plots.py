"""PNG plots of a run: one per suite, with all engines and the machine's limit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.bench.engines import OURS
from sdk.bench.models import Work
from sdk.bench.report import Section
from sdk.kernels.packages import install, is_installed
from sdk.quant.spec import KVTypes

#: Suites drawn as lines over a case: its key and label. The others are bars.
_OVER = {
    "prefill": ("prompt", "prompt length, tokens"),
    "decode": ("requests", "concurrent requests"),
    "context": ("context", "context, tokens"),
}


def check_matplotlib() -> None:
    """Call before a long measurement. :raises RequestError: it is not installed."""
    if not is_installed("matplotlib"):
        raise RequestError(f"--plots: matplotlib is not installed: {install('matplotlib')}")


def write_plots(
    folder: Path,
    report: Mapping[str, Any],
    sections: Mapping[str, Section],
    work: Work,
) -> list[Path]:
    """One file per suite, ``<suite>.png``; returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, section in sections.items():
        path = folder / f"{name}.png"
        if name in _OVER:
            _draw_over(path, name, section, report, work)
        else:
            _draw_bars(path, section, report)
        written.append(path)
    return written


def _draw_over(
    path: Path, suite: str, section: Section, report: Mapping[str, Any], work: Work
) -> None:
    from matplotlib.figure import Figure

    key, label = _OVER[suite]
    metric = section.metrics[0]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    cases = list(dict.fromkeys(int(result.case[key]) for result in section.results))
    for name in dict.fromkeys(result.name for result in section.results):
        rows = [result for result in section.results if result.name == name]
        axes.plot(
            [cases.index(int(row.case[key])) for row in rows],
            [row.median(metric.key) for row in rows],
            marker="o",
            label=name,
        )
    kv = next((result.kv for result in section.results if result.engine == OURS), "")
    kv_bytes = KVTypes.parse(kv or "float16").bytes_per_value
    limits = [limit(suite, case, report["machine"], work, kv_bytes) for case in cases]
    axes.plot(range(len(cases)), limits, "k--", marker="_", label="limit of this machine")
    axes.set_xticks(range(len(cases)), [str(case) for case in cases])
    axes.set_xlabel(label)
    axes.set_ylabel(metric.heading)
    axes.set_yscale("log")  # engines and limit are up to a factor of 100 apart
    axes.set_title(f"{section.title}: {report['model']}, {report['settings']['threads']} threads")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def limit(suite: str, case: int, machine: Mapping[str, Any], work: Work, kv_bytes: float) -> float:
    """Tokens per second that memory or the integer units allow, whichever is less.

    The tokens of a prompt share one read of the weights, as do the decodes of concurrent requests.
    """
    bandwidth: float = 1e9 * max(machine["read_gb_per_s"].values())
    peak: float = 1e12 * max(machine["int8_tops"].values())
    if suite == "prefill":
        return peak / (2 * work.prompt_weights)
    requests = case if suite == "decode" else 1
    context = case if suite == "context" else 0
    moved = work.bytes_per_token + context * work.kv_numbers * kv_bytes
    return min(requests * bandwidth / moved, peak / (2 * work.decode_weights))


def _draw_bars(path: Path, section: Section, report: Mapping[str, Any]) -> None:
    """One panel per column, because their units differ."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(section.metrics), 4.5), layout="constrained")
    names = [
        " ".join(filter(None, [result.name, result.kv, *map(str, result.case.values())]))
        for result in section.results
    ]
    for i, metric in enumerate(section.metrics):
        axes = figure.add_subplot(1, len(section.metrics), i + 1)
        values = [result.median(metric.key) for result in section.results]
        bars = axes.bar(range(len(values)), values, color=[f"C{j}" for j in range(len(values))])
        axes.bar_label(bars, fmt=f"%.{metric.digits}f")
        axes.set_xticks(range(len(values)), names, rotation=20, ha="right", fontsize="small")
        axes.set_ylabel(metric.heading)
        if metric.heading.startswith("%"):
            axes.axhline(100, color="k", linestyle="--", label="100 %")
            axes.legend(fontsize="small")
    figure.suptitle(f"{section.title}: {report['model']}")
    figure.savefig(path, dpi=120)
