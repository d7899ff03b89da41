"""A sliding window: what was admitted in the last minute."""

from __future__ import annotations

import math
from collections import deque


class Entry:
    """What one request was charged, and when."""

    __slots__ = ("amount", "at", "expired")

    def __init__(self, at: float, amount: int) -> None:
        self.at = at
        self.amount = amount
        self.expired = False


class SlidingWindow:
    """A log of the charges of the last ``seconds``; ``total`` is their exact sum.

    Two other ways were rejected. A token bucket that holds a minute's worth admits up to twice the
    limit in the minute after a pause, and it cannot take back exactly what a request reserved but
    did not use, once it has been full in between. Counters per fixed window admit twice the limit
    around a border. The log costs 90 bytes for each request of the last minute, whoever sent it.

    Not thread-safe: :class:`~sdk.serving.guard.usage.Meter` holds a lock.
    """

    __slots__ = ("_entries", "seconds", "total")

    def __init__(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.total = 0
        self._entries: deque[Entry] = deque()

    def forget(self, now: float) -> None:
        """Remove the charges that are at least ``seconds`` old."""
        entries = self._entries
        while entries and entries[0].at + self.seconds <= now:
            entry = entries.popleft()
            entry.expired = True
            self.total -= entry.amount

    def wait(self, amount: int, limit: int, now: float) -> float:
        """Seconds until ``amount`` more fits into ``limit``: 0 if it does now, infinite if never.

        Charges only shrink (a request uses at most what it reserved), so this is the longest wait.
        """
        self.forget(now)
        excess = self.total + amount - limit
        if excess <= 0:
            return 0.0
        if amount > limit:
            return math.inf
        for entry in self._entries:
            excess -= entry.amount
            if excess <= 0:
                return entry.at + self.seconds - now
        raise AssertionError("the total is not the sum of the charges")

    def charge(self, amount: int, now: float) -> Entry:
        """Add a charge. The clock must not run backwards."""
        self.forget(now)  # also where no limit asks for the total
        entry = Entry(now, amount)
        self._entries.append(entry)
        self.total += amount
        return entry

    def correct(self, entry: Entry, amount: int) -> None:
        """Charge ``amount`` instead, as if it had been known from the start."""
        if not entry.expired:
            self.total += amount - entry.amount
            entry.amount = amount

    def reset_after(self, now: float) -> float:
        """Seconds until the window is empty if nothing more is charged."""
        self.forget(now)
        return self._entries[-1].at + self.seconds - now if self._entries else 0.0

    def __len__(self) -> int:
        return len(self._entries)
