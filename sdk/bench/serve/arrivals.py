"""When requests arrive: an open loop does not wait for answers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A random process of ``rate`` arrivals per second on average.

    The times between arrivals are gamma distributed with the shape ``burstiness``: 1 is a Poisson
    process, less has bursts, infinity is a constant distance (as in ``vllm bench serve``). With
    ``on_s`` and ``off_s``, all arrivals fall into periods of ``on_s`` seconds with pauses of
    ``off_s`` between them, at a rate that is higher by as much.
    """

    rate: float
    burstiness: float = 1.0
    on_s: float = 0.0
    off_s: float = 0.0

    def times(self, count: int, seed: int) -> list[float]:
        """Seconds after the start of ``count`` arrivals, sorted.

        The times are scaled so that the last one is at ``count / rate``: otherwise the offered rate
        of a run of 100 requests would differ from ``rate`` by a tenth.
        """
        draw = random.Random(seed)
        now, busy = 0.0, []
        for _ in range(count):
            now += self._interval(draw)
            busy.append(now)
        scale = count / self.rate / now if now else 0.0
        if not self.on_s:
            return [time * scale for time in busy]
        # Time that passes only in the periods, then the pauses between them.
        period = self.on_s + self.off_s
        found = []
        for time in busy:
            full, rest = divmod(time * scale * self.on_s / period, self.on_s)
            found.append(full * period + rest)
        return found

    def _interval(self, draw: random.Random) -> float:
        if math.isinf(self.burstiness):
            return 1.0
        return draw.gammavariate(self.burstiness, 1 / self.burstiness)

    def at(self, rate: float) -> Arrivals:
        """The same process with another rate."""
        return Arrivals(rate, self.burstiness, self.on_s, self.off_s)
