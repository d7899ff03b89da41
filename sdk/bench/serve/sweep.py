"""The highest rate that a target sustains: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sdk.bench.serve.summary import Summary

#: The search starts at this many requests per second, and ends at the other. Downwards it ends at
#: a sixteenth of the first.
FIRST_RATE, LAST_RATE = 1.0, 4096.0
#: It ends when the lowest rate that fails is at most this much above the highest that passes.
RESOLUTION = 1.05


@dataclass(frozen=True, slots=True)
class Probe:
    """One run of a sweep: the offered rate, what came of it, and whether that was good enough."""

    rate: float
    summary: Summary
    passed: bool


def sweep(
    run: Callable[[float], Summary],
    needed: float,
    *,
    first: float = FIRST_RATE,
    growth: float = 2.0,
    resolution: float = RESOLUTION,
    tries: int = 2,
    report: Callable[[Probe], None] = lambda probe: None,
) -> tuple[float, list[Probe]]:
    """The highest rate of which a share of at least ``needed`` of the requests is good, 0 if there
    is none, and all probes. ``run`` offers a rate and needs an SLO.

    The rate grows from ``first`` by the factor ``growth`` until it fails. A rate fails only if it
    does so in ``tries`` runs: other programs on the machine can make a run worse, never better.
    """
    probes: list[Probe] = []

    def passes(rate: float) -> bool:
        for _ in range(tries):
            summary = run(rate)
            probe = Probe(rate, summary, (summary.good_share or 0.0) >= needed)
            probes.append(probe)
            report(probe)
            if probe.passed:
                return True
        return False

    low, high = 0.0, first
    while high <= LAST_RATE and passes(high):
        low, high = high, growth * high
    if not low:  # the first rate was too high
        while high > first / 16:
            high /= growth
            if passes(high):
                low, high = high, growth * high
                break
        else:
            return 0.0, probes
    while high <= LAST_RATE and high > low * resolution:
        middle = (low * high) ** 0.5
        if passes(middle):
            low = middle
        else:
            high = middle
    return low, probes
