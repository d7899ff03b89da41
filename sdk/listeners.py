"""Where outputs arrive: a mailbox for threads, one for event loops, a collector for ``enqueue``."""

from __future__ import annotations

import asyncio
import queue

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
    """Final outputs of enqueued requests, kept until somebody asks."""

    def __init__(self) -> None:
        self._results: dict[str, _Item] = {}
        self._order: list[str] = []
        self._arrived: queue.SimpleQueue[None] = queue.SimpleQueue()

    def expect(self, request_id: str) -> None:
        self._order.append(request_id)

    def deliver(self, output: Output) -> bool:
        if output.finished:
            self._results[output.request_id] = output
            self._arrived.put(None)
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        self._results[request_id] = error
        self._arrived.put(None)

    def discard(self, request_id: str) -> None:
        """Forget a request whose final output was handed out in another way."""
        if request_id in self._order:
            self._order.remove(request_id)
            self._results.pop(request_id, None)

    def pending(self) -> list[str]:
        """Requests without a final output."""
        return [request_id for request_id in self._order if request_id not in self._results]

    def wait(self) -> list[Output]:
        """All outputs in the order of enqueueing; raises the first failure. Then forgets them."""
        while self.pending():
            self._arrived.get()
        items = [self._results[request_id] for request_id in self._order]
        self._order.clear()
        self._results.clear()
        for item in items:
            if isinstance(item, Exception):
                raise item
        return [item for item in items if not isinstance(item, Exception)]
