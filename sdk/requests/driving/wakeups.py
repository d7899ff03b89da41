"""Waiting for something to change: threads that signal handlers may interrupt, and event loops.

All outputs of a step wake an event loop once. A wake-up is a system call of 5 us in the engine's
thread: if each of 32 streams made its own, every step would make 32.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


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


_Put = Callable[[Any], None]


class LoopInbox:
    """Hands items to functions that run in the loop's thread.

    It refers to the loop weakly, because it is kept in a table by loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._items: deque[tuple[_Put, Any]] = deque()
        self._woken = False  # the loop is going to empty the inbox

    def post(self, put: _Put, item: Any) -> bool:
        """Have ``put(item)`` called soon; ``False`` if the loop was closed. From any thread."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._items.clear()
            return False
        self._items.append((put, item))
        if self._woken:  # set to False before the inbox is emptied, so this item is seen
            return True
        try:
            self._woken = True
            loop.call_soon_threadsafe(self.empty)
        except RuntimeError:  # closed since
            self._woken = False
            return False
        except BaseException:  # of a signal handler
            self._woken = False
            raise
        return True

    def empty(self) -> None:
        """Hand over everything. In the loop's thread."""
        self._woken = False
        items = self._items
        while items:
            put, item = items.popleft()
            put(item)


class LoopInboxes:
    """One inbox for each event loop, for callers on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> LoopInbox:
        """That of the running loop."""
        import asyncio  # with ssl and sockets it takes 20 ms, which threads do not need

        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._inboxes.get(loop)
            if found is None:
                found = self._inboxes[loop] = LoopInbox(loop)
            return found
