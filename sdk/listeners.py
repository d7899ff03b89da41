"""Where outputs arrive: a mailbox for threads, one for event loops, a collector for ``enqueue``."""

from __future__ import annotations

import asyncio
import queue
import threading

from sdk.engine.engine import Output

_Item = Output | Exception


class Mailbox:
    """Outputs of one call's requests, waited for by a thread; Ctrl-C interrupts ``get``."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()

    def deliver(self, output: Output) -> bool:
        self._items.put(output)
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        self._items.put(error)

    def get(self) -> Output:
        """The next output; raises what the request failed with."""
        item = self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class AsyncMailbox:
    """The same for the event loop it was made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item] = asyncio.Queue()

    def _post(self, item: _Item) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop was closed: nobody will ever read this
            return False
        return True

    def deliver(self, output: Output) -> bool:
        return self._post(output)

    def fail(self, request_id: str, error: Exception) -> None:
        self._post(error)

    async def get(self) -> Output:
        """The next output; raises what the request failed with."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class Collector:
    """Outputs of enqueued requests, kept until somebody asks: for all that is new, or to the end.

    Of a request whose outputs are cumulative only the latest is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._deltas: dict[str, bool] = {}  # in the order of enqueueing
        self._finals: dict[str, _Item] = {}
        self._news: dict[str, list[Output]] = {}

    def expect(self, request_id: str, *, deltas: bool = False) -> None:
        with self._changed:
            self._deltas[request_id] = deltas

    def deliver(self, output: Output) -> bool:
        request_id = output.request_id
        with self._lock:
            if self._deltas[request_id]:
                self._news.setdefault(request_id, []).append(output)
            else:
                self._news[request_id] = [output]
            if output.finished:
                self._finals[request_id] = output
                self._changed.notify_all()
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        with self._changed:
            self._finals[request_id] = error
            self._changed.notify_all()

    @property
    def has_news(self) -> bool:
        """Whether ``take`` would return or raise anything."""
        return bool(self._news or self._finals)

    def take(self) -> list[Output]:
        """What came since the last time, finished requests for the last time; raises a failure when
        there is nothing to return.
        """
        with self._lock:
            outputs = [output for news in self._news.values() for output in news]
            self._news.clear()
            for output in outputs:
                if output.finished:
                    del self._finals[output.request_id], self._deltas[output.request_id]
            if not outputs:
                for request_id, item in self._finals.items():
                    if isinstance(item, Exception):
                        del self._finals[request_id], self._deltas[request_id]
                        raise item
            self._changed.notify_all()
            return outputs

    def pending(self) -> list[str]:
        """Requests without a final output."""
        with self._changed:
            return [request_id for request_id in self._deltas if request_id not in self._finals]

    def wait(self) -> list[Output]:
        """All final outputs in the order of enqueueing, or the first failure; then forgets them."""
        with self._changed:
            while any(request_id not in self._finals for request_id in self._deltas):
                self._changed.wait()
            items = [self._finals[request_id] for request_id in self._deltas]
            self._deltas.clear()
            self._finals.clear()
            self._news.clear()
        for item in items:
            if isinstance(item, Exception):
                raise item
        return [item for item in items if not isinstance(item, Exception)]
