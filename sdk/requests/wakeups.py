"""Waiting for something to change, in threads that signal handlers may interrupt."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue


class Wakeups:
    """Lets threads wait until a condition holds, and wakes them after a change.

    Replaces ``threading.Condition``, whose methods are Python code: an exception of a signal
    handler (Ctrl-C, a host's timer) inside one of them leaves its lock taken, and all other
    threads hang. A ``SimpleQueue``, and ``with`` on an ``RLock``, run entirely in C.
    """

    def __init__(self) -> None:
        self._waiting: set[SimpleQueue[None]] = set()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Return once ``ready()`` is true; checked after every ``notify_all``, without a lock."""
        news: SimpleQueue[None] = SimpleQueue()
        try:
            self._waiting.add(news)
            while not ready():
                news.get()
        finally:
            self._waiting.discard(news)

    def notify_all(self) -> None:
        """Wake the waiting threads; call it after the change."""
        for news in tuple(self._waiting):
            if news.empty():  # one wakeup is enough, however many changes there were
                news.put(None)
