"""The results of simulations as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sdk.cli.table import format_table
from sdk.cluster.simulation.results import ClassResults, Results, percentile

_HEAD = (
    *("policy", "class", "requests", "TTFT p50", "p95", "p99", "ITL p50", "p99"),
    *("good", "cached"),
)
_SECOND = (
    *("policy", "seconds", "requests/s", "good/s", "cached", "busy", "replicas"),
    *("rerouted", "moved turns", "preempted", "gap p99"),
)
#: Percentiles in the JSON.
_PERCENTS = (50, 90, 95, 99, 99.9)


def as_tables(found: Mapping[str, Results]) -> str:
    """Times by policy and class, then what the replicas did. Times are ms."""
    rows = []
    for policy, results in found.items():
        classes = dict(sorted(results.classes.items()))
        for name, one in [*classes.items(), ("all", results.all)]:
            rows.append([policy, name, *_times(one)])
    totals = [[policy, *_totals(results)] for policy, results in found.items()]
    times = format_table(_HEAD, rows, 2)
    return f"{times}\n\n{format_table(_SECOND, totals)}\n\nTTFT, ITL and gaps in ms."


def _times(one: ClassResults) -> list[str]:
    count = len(one.ttft)
    return [
        str(count),
        *(_ms(percentile(one.ttft, percent)) for percent in (50, 95, 99)),
        *(_ms(percentile(one.itl, percent)) for percent in (50, 99)),
        f"{one.num_good / count:.1%}",
        f"{one.cached_tokens / one.prompt_tokens:.1%}",
    ]


def _totals(results: Results) -> list[str]:
    count, seconds = len(results.all.ttft), max(results.seconds, 1e-9)
    return [
        f"{results.seconds:.1f}",
        f"{count / seconds:.2f}",
        f"{results.goodput:.2f}",
        f"{results.hit_rate:.1%}",
        f"{results.utilization:.1%}",
        f"{results.replica_seconds / seconds:.4g}",
        str(results.num_rerouted),
        str(results.num_moved_turns),
        str(results.num_preemptions),
        _ms(results.gaps.read().p99),
    ]


def as_json(
    found: Mapping[str, Results], walls: Mapping[str, float], options: Mapping[str, Any]
) -> str:
    """All numbers, in seconds, and the options of the command. ``walls``: the seconds that each
    simulation took."""
    plain = {name: one for name, one in options.items() if isinstance(one, str | int | float)}
    policies = {
        policy: {
            "seconds": results.seconds,
            "wall_seconds": round(walls[policy], 3),
            "steps": results.num_steps,
            "goodput": results.goodput,
            "hit_rate": results.hit_rate,
            "utilization": results.utilization,
            "rerouted": results.num_rerouted,
            "moved_turns": results.num_moved_turns,
            "preempted": results.num_preemptions,
            "replicas": results.replicas,
            "classes": {
                name: _numbers(one)
                for name, one in [*sorted(results.classes.items()), ("all", results.all)]
            },
        }
        for policy, results in found.items()
    }
    return json.dumps({"options": plain, "policies": policies}, indent=1) + "\n"


def _numbers(one: ClassResults) -> dict[str, Any]:
    numbers: dict[str, Any] = {"requests": len(one.ttft), "good": one.num_good}
    for name, values in (("ttft", one.ttft), ("itl", one.itl), ("e2e", one.e2e)):
        if values:
            numbers[name] = {f"p{percent}": percentile(values, percent) for percent in _PERCENTS}
            numbers[name]["mean"] = sum(values) / len(values)
    numbers["prompt_tokens"], numbers["cached_tokens"] = one.prompt_tokens, one.cached_tokens
    numbers["output_tokens"] = one.output_tokens
    return numbers


def _ms(seconds: float) -> str:
    return "-" if seconds != seconds else f"{1000 * seconds:.4g}"
