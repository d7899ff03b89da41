"""A clock that tests set."""

from __future__ import annotations


class Clock:
    """Call it for the time; change ``now``."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
