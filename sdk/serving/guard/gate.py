"""How many requests are inside at one time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sdk.serving.access import Refused


class Gate:
    """Lets at most ``places`` requests in; the others are refused at once, before anything is read.

    The time to retry is an estimate: the refused requests of the last second share the places in
    turn, each place becoming free after the mean time of the requests so far (an exponential mean
    over about 32 requests). It is at least 1 s and at most 60 s.

    Not thread-safe: of one event loop.
    """

    def __init__(self, places: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.places = places
        self.inside = 0
        #: How many were refused since the server began.
        self.refused = 0
        self._clock = clock
        self._mean = 1.0
        self._recently = 0
        self._second = 0.0

    @property
    def full(self) -> bool:
        """Whether the next request would be refused."""
        return self.inside >= self.places

    def enter(self) -> float:
        """Take a place; returns the time for :meth:`leave`. :raises Refused: 429, none is free."""
        if self.inside >= self.places:
            raise self.refusal()
        self.inside += 1
        return self._clock()

    def refusal(self) -> Refused:
        """Count a refusal, and say when to try again."""
        now = self._clock()
        if now - self._second >= 1:
            self._second, self._recently = now, 0
        self._recently += 1
        self.refused += 1
        wait = min(60, max(1, math.ceil(self._mean * self._recently / self.places)))
        return Refused(
            429,
            f"The server is busy with {self.places} requests. Try again in {wait} s.",
            "server_busy",
            {"retry-after": str(wait)},
        )

    def leave(self, entered: float) -> None:
        """Give the place back."""
        self.inside -= 1
        self._mean += (self._clock() - entered - self._mean) / 32
