"""A sample in the numbers that a report shows of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from sdk.metrics.percentiles import percentile as percentile


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample in a few numbers."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """``None`` without values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}
