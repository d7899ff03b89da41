"""A clock that a test moves."""

from __future__ import annotations

import threading


class ManualClock:
    """Time that passes only in :meth:`sleep`: ``FakeLLM(..., clock=clock, sleep=clock.sleep)``."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        """Move the time forward and return at once."""
        with self._lock:
            self._now += seconds
