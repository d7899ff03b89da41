"""How long the stages of a pipeline compute, and how long they could."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic


class StageTimes:
    """Seconds of each stage, added up over the steps so far.

    The share of ``in_flight`` in which a stage does not compute is its bubble.
    """

    def __init__(self, stages: int) -> None:
        #: Seconds in which each stage ran a step; without waiting for its neighbours.
        self.computing = [0.0] * stages
        self._in_flight = 0.0
        self._since: float | None = None  # steps have been in flight without a break

    @property
    def in_flight(self) -> float:
        """Seconds in which at least one step was in flight."""
        since = self._since
        return self._in_flight + (0.0 if since is None else monotonic() - since)

    def begin(self) -> None:
        """A step was launched."""
        if self._since is None:
            self._since = monotonic()

    def end(self, left: int) -> None:
        """A step is over; ``left`` are in flight."""
        if not left and self._since is not None:
            self._in_flight += monotonic() - self._since
            self._since = None

    def numbers(self) -> dict[str, float]:
        """For ``get_metrics()``; docs/metrics.md describes them."""
        in_flight = self.in_flight
        found = {f"stage_{i}_seconds": seconds for i, seconds in enumerate(self.computing)}
        found["pipeline_seconds"] = in_flight
        found["pipeline_bubble"] = bubble(self.computing, in_flight)
        return found


def bubble(computing: Sequence[float], in_flight: float) -> float:
    """The share of the time with steps in flight in which a stage did not compute."""
    possible = len(computing) * in_flight
    busy = sum(computing) / possible if possible else 1.0
    return min(max(1.0 - busy, 0.0), 1.0)
