"""PNG plots of runs: latencies of every request, and rates against what was offered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sdk.bench.serve.runs import Run
from sdk.bench.serve.summary import Summary


def write_plots(folder: Path, runs: Sequence[Run], *, swept: bool = False) -> list[Path]:
    """``latencies.png``, and ``rates.png`` if several rates were offered; returns the paths.

    Needs matplotlib (:func:`sdk.bench.plots.check_matplotlib`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if not swept:
        written.append(_draw_latencies(folder / "latencies.png", runs))
    if len({run.case.rate for run in runs if run.case.rate is not None}) > 1:
        written.append(_draw_rates(folder / "rates.png", runs))
    return written


def _draw_latencies(path: Path, runs: Sequence[Run]) -> Path:
    """The share of requests (of gaps for ITL) that took at most so long, for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    panels = figure.subplots(1, 3)
    for run in runs:
        fine = [record for record in run.records if record.error is None]
        samples = (
            [record.ttft for record in fine],
            [gap for record in fine for gap in record.gaps],
            [record.e2e for record in fine],
        )
        for axes, values in zip(panels, samples, strict=True):
            if values:
                axes.ecdf([1000 * value for value in values], label=f"{run.subject}, {run.case}")
    for axes, name in zip(
        panels, ("time to first token", "inter-token", "end to end"), strict=True
    ):
        axes.set_xlabel(f"{name}, ms")
        axes.set_xscale("log")
        axes.grid(True, which="both", alpha=0.3)
    panels[0].set_ylabel("share")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path


def _draw_rates(path: Path, runs: Sequence[Run]) -> Path:
    """Over the offered rate: completed and good requests per second, and TTFT."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(run.subject for run in runs):
        mine = sorted(
            (run for run in runs if run.subject == name and run.case.rate is not None),
            key=lambda run: run.case.rate or 0.0,
        )
        rates = [run.case.rate for run in mine]

        def values(find: Callable[[Summary], float], mine: Sequence[Run] = mine) -> list[float]:
            return [find(run.summary) for run in mine]

        (drawn,) = left.plot(rates, values(lambda s: s.request_rate), marker="o", label=name)
        if all(run.summary.good is not None for run in mine):
            good = values(lambda s: s.good_rate or 0.0)
            left.plot(
                rates, good, marker="x", ls="--", color=drawn.get_color(), label=f"{name}, good"
            )
        for part, style in (("p50", "-"), ("p99", "--")):
            shown = [(run, run.summary.latencies.get("ttft")) for run in mine]
            right.plot(
                [run.case.rate for run, found in shown if found is not None],
                [1000 * getattr(found, part) for _, found in shown if found is not None],
                ls=style,
                marker="o",
                color=drawn.get_color(),
                label=f"{name}, {part}",
            )
    left.set_ylabel("requests per second")
    right.set_ylabel("time to first token, ms")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("offered per second")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path
