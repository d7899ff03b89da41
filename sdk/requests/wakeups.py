"""Waiting for something to change, in threads that signal handlers may interrupt."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue


class Wakeups:
    """Threads that wait until something is so, and whoever changes it.

    In place of ``threading.Condition``, whose methods are Python code: an exception of a signal
    handler (Ctrl-C, a host's timer) that is raised in one of them leaves its lock taken, and every
    other thread hangs. A ``SimpleQueue`` and ``with`` on an ``RLock`` are C code throughout.
    """

    def __init__(self) -> None:
        self._waiting: set[SimpleQueue[None]] = set()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Return once ``ready()``; it is asked again after every ``notify_all``, without a lock."""
        news: SimpleQueue[None] = SimpleQueue()
        try:
            self._waiting.add(news)
            while not ready():
                news.get()
        finally:
            self._waiting.discard(news)

    def notify_all(self) -> None:
        """Call after the change, so that whoever waits sees it."""
        for news in tuple(self._waiting):
            if news.empty():  # one wakeup is enough, however many changes there were
                news.put(None)
