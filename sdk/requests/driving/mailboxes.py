"""Output sinks: a mailbox for threads, one for event loops, and a collector for ``enqueue``."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, overload

from sdk.api.errors import EngineClosedError, RequestError
from sdk.engine.engine import Output
from sdk.quant.safe_repr import safe_repr
from sdk.requests.driving.driver import check_process
from sdk.requests.driving.wakeups import LoopInbox, Wakeups

if TYPE_CHECKING:
    import asyncio

_Item = Output | Exception
#: 64 concurrent streams cost 64 timer calls of 2 us each in this time.
_FORK_CHECK_S = 1.0


class Mailbox:
    """The outputs of one call's requests, for a waiting thread; Ctrl-C interrupts ``get``."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._owner = os.getpid()

    def deliver(self, output: Output) -> bool:
        self._items.put(output)
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        self._items.put(error)

    @overload
    def get(self) -> Output: ...
    @overload
    def get(self, seconds: float | None) -> Output | None: ...
    def get(self, seconds: float | None = None) -> Output | None:
        """The next output; raises what the request failed with. ``seconds``: the longest wait, if
        there is one; then None.

        :raises EngineClosedError: in a forked child, where no output will ever come.
        """
        check_process(self._owner)
        try:
            item = self._items.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            raise item
        return item

    @property
    def has_some(self) -> bool:
        """Whether :meth:`get` would not wait."""
        return not self._items.empty()


class AsyncMailbox:
    """A :class:`Mailbox` for the event loop it was created in.

    A coroutine may fork while others wait here, and the child may go on with a copy of the loop.
    A timer of that loop then raises the error in the coroutines that wait there.
    """

    def __init__(self, inbox: LoopInbox) -> None:
        import asyncio  # see LoopInboxes.current

        self._loop = asyncio.get_running_loop()
        self.inbox = inbox
        self._items: deque[_Item] = deque()
        self._waiting: asyncio.Future[None] | None = None
        self._owner = os.getpid()
        self.check_later()

    def check_later(self) -> None:
        """Look for a fork a second later, as long as this mailbox is alive."""
        self._loop.call_later(_FORK_CHECK_S, _look_for_fork, weakref.ref(self))

    def fail_after_fork(self) -> bool:
        """Whether this is a forked child; then :meth:`get` raises the error."""
        try:
            check_process(self._owner)
        except EngineClosedError as error:
            self.put(error)
            return True
        return False

    def put(self, item: _Item) -> None:
        """Add an item. In the loop's thread."""
        self._items.append(item)
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def deliver(self, output: Output) -> bool:
        return self.inbox.post(self.put, output)

    def fail(self, request_id: str, error: Exception) -> None:
        self.inbox.post(self.put, error)

    async def get(self) -> Output:
        """The next output; raises what the request failed with. One coroutine may wait.

        :raises EngineClosedError: in a forked child, where no output will ever come.
        """
        check_process(self._owner)
        while not self._items:
            self._waiting = self._loop.create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None
        return self._first()

    @property
    def has_some(self) -> bool:
        """Whether :meth:`get` would not wait."""
        return bool(self._items)

    def get_more(self) -> list[Output]:
        """All further outputs that are here."""
        outputs = []
        while self._items and not isinstance(self._items[0], Exception):
            outputs.append(self._first())
        return outputs

    def _first(self) -> Output:
        item = self._items.popleft()
        if isinstance(item, Exception):
            raise item
        return item


def _look_for_fork(mailbox: weakref.ref[AsyncMailbox]) -> None:
    """Fail the mailbox in a forked child; in the owner check again a second later."""
    waiting = mailbox()
    if waiting is not None and not waiting.fail_after_fork():
        waiting.inbox.empty()  # if a signal handler's exception kept it from waking the loop
        waiting.check_later()


class Collector:
    """Outputs of enqueued requests, kept until they are collected: new ones, or the last ones.

    If a request's outputs are cumulative, only the latest is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = Wakeups()
        self._deltas: dict[str, bool] = {}  # in the order of enqueueing
        self._finals: dict[str, _Item] = {}
        self._news: dict[str, list[Output]] = {}

    def expect(self, requests: Mapping[str, bool], submit: Callable[[], None]) -> None:
        """Call ``submit`` and expect the outputs of ``requests``, unless it fails.

        ``requests``: by id, whether its outputs are deltas. No other thread sees the requests
        before they are submitted.

        :raises RequestError: the last output of a request with the same id is not collected yet.
        """
        with self._lock:
            for request_id in requests:
                if request_id in self._deltas:
                    raise RequestError(
                        f"request_id: the output of {safe_repr(request_id)} was not collected yet; "
                        "collect it with step() or wait_for_completion(), or use another id"
                    )
            try:
                self._deltas.update(requests)
                submit()
            except BaseException:
                for request_id in requests:
                    self._deltas.pop(request_id, None)
                raise

    def deliver(self, output: Output) -> bool:
        request_id = output.request_id
        with self._lock:
            deltas = self._deltas.get(request_id)
            if deltas is None:  # submitting it was interrupted
                return False
            if deltas:
                self._news.setdefault(request_id, []).append(output)
            else:
                self._news[request_id] = [output]
            if output.finished:
                self._finals[request_id] = output
                self._changed.notify_all()
        return True

    def fail(self, request_id: str, error: Exception) -> None:
        with self._lock:
            if request_id in self._deltas:
                self._finals[request_id] = error
                self._changed.notify_all()

    @property
    def has_news(self) -> bool:
        """Whether ``take`` would return or raise anything."""
        return bool(self._news or self._finals)

    def take(self) -> list[Output]:
        """All outputs since the last call; finished requests are then forgotten.

        If there are none, raises the error of a failed request, if there is one.
        """
        with self._lock:
            outputs = [output for news in self._news.values() for output in news]
            self._news.clear()
            for output in outputs:
                if output.finished:
                    del self._finals[output.request_id], self._deltas[output.request_id]
            self._changed.notify_all()
            if not outputs:
                self._raise_failure(list(self._finals))
            return outputs

    def _raise_failure(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            item = self._finals.get(request_id)
            if isinstance(item, Exception):
                del self._finals[request_id], self._deltas[request_id]
                raise item

    def expected(self) -> list[str]:
        """All requests whose last output is not collected yet, in the order of enqueueing."""
        with self._lock:
            return list(self._deltas)

    def _ended(self, running: deque[str]) -> bool:
        """Whether all have ended; removes those at the front that have from ``running``."""
        while running:
            if running[0] in self._deltas and running[0] not in self._finals:
                return False
            running.popleft()
        return True

    def wait(self, request_ids: Sequence[str]) -> list[Output]:
        """Wait until all of these have ended; their last outputs, unless already collected.

        The first failure is raised and forgotten; the other outputs stay for the next call.
        """
        self._changed.wait_for(partial(self._ended, deque(request_ids)))
        with self._lock:
            self._raise_failure(request_ids)
            outputs = []
            for request_id in request_ids:
                item = self._finals.pop(request_id, None)
                if item is not None and not isinstance(item, Exception):
                    outputs.append(item)
                    del self._deltas[request_id]
                    self._news.pop(request_id, None)
            self._changed.notify_all()
        return outputs
