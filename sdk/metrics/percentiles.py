"""Percentiles of a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, at least one, interpolated linearly between the two nearest
    ones, as numpy and vLLM do by default."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
