"""Histograms with fixed buckets, from which quantiles are read.

Buckets grow by 12 % (20 per decade). The bounds of vLLM's histograms are bounds here too, so what
Prometheus gets for these is exact.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import field
from itertools import accumulate
from math import inf, nan

from sdk.kernels.dataclass import dataclass

_PER_DECADE = 20
#: The bounds of vLLM's histograms, and smaller ones, because small models are faster: of times to
#: first token, of times between tokens, and of whole requests and their parts.
TTFT_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_TIME_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_TIME_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
#: 1, 2, 5, 10, ... 1,000,000 tokens.
TOKEN_BOUNDS = (*(float(m * 10**e) for e in range(6) for m in (1, 2, 5)), 1e6)


def _bounds(first: int, last: int, *also: Sequence[float]) -> tuple[float, ...]:
    """Bounds from ``10**first`` to ``10**last``."""
    steps = range(first * _PER_DECADE, last * _PER_DECADE + 1)
    grid = [float(f"{10 ** (step / _PER_DECADE):.4g}") for step in steps]
    return tuple(sorted({*grid, *(bound for bounds in also for bound in bounds)}))


#: 10 us to 10,000 s.
SECONDS = _bounds(-5, 4, TTFT_BOUNDS, TOKEN_TIME_BOUNDS, REQUEST_TIME_BOUNDS)
#: 1 to 1,000,000 tokens.
TOKENS = _bounds(0, 6, TOKEN_BOUNDS)


@dataclass(frozen=True, slots=True)
class HistogramData:
    """A histogram at one moment.

    ``counts[i]`` values lie in ``(bounds[i - 1], bounds[i]]``; the last count is of those above all
    bounds. ``sum`` is the exact sum of the values.
    """

    bounds: tuple[float, ...] = field(repr=False)
    counts: tuple[int, ...] = field(repr=False)
    sum: float
    count: int

    @property
    def mean(self) -> float:
        """The exact mean; NaN without values."""
        return self.sum / self.count if self.count else nan

    def quantile(self, share: float) -> float:
        """The value that a ``share`` of the values (0 to 1) do not exceed; NaN without values.

        Values are taken to be spread evenly in their bucket, as Prometheus does it. Buckets are
        at most 12.3 % wide. Above all bounds: the largest bound.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"quantile: expected a share from 0 to 1, found {share!r:.80}")
        rank, below = share * self.count, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= rank:
                if index == len(self.bounds):
                    return self.bounds[-1]
                low = self.bounds[index - 1] if index else 0.0
                return low + (self.bounds[index] - low) * max(rank - below, 0) / count
            below += count
        return nan

    @property
    def p50(self) -> float:
        """The median."""
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        """The 95th percentile."""
        return self.quantile(0.95)

    @property
    def p99(self) -> float:
        """The 99th percentile."""
        return self.quantile(0.99)

    def cumulative(self, bounds: Sequence[float]) -> list[tuple[float, int]]:
        """How many values do not exceed each of ``bounds`` (some of ``self.bounds``); then all."""
        totals = list(accumulate(self.counts))
        found = [(bound, totals[bisect_left(self.bounds, bound)]) for bound in bounds]
        return [*found, (inf, totals[-1])]

    def __add__(self, other: HistogramData) -> HistogramData:
        """The values of both, which have the same bounds."""
        if self.bounds != other.bounds:
            raise ValueError("histograms with different bounds cannot be added")
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramData(self.bounds, counts, self.sum + other.sum, self.count + other.count)

    def __sub__(self, earlier: HistogramData) -> HistogramData:
        """The values added since ``earlier``, a snapshot of the same histogram."""
        if self.bounds != earlier.bounds:
            raise ValueError("histograms with different bounds cannot be subtracted")
        counts = tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True))
        return HistogramData(
            self.bounds, counts, self.sum - earlier.sum, self.count - earlier.count
        )


class Histogram:
    """Counts values. One thread adds; any thread may take a snapshot.

    There is no lock: taking one costs 6 us after a step, because the caches are full of weights. A
    snapshot copies the counts at once, and its sum may have one value more or less than they have.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value``, several ``times``."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def read(self) -> HistogramData:
        """A snapshot."""
        counts = tuple(self.counts)
        return HistogramData(self.bounds, counts, self.sum, sum(counts))
