"""Hands prefixes over to other engines while they are computed.

Each hand-over has a thread while it is active. After a step of its request the thread reads the new
full pages, between two steps, and sends them while the next step runs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from sdk.api.errors import SdkError, TransferError
from sdk.cluster.transfer.connector import KVConnector, Offer, Part, Rows, Sending
from sdk.cluster.transfer.engine_pages import EnginePages, HandedOver, checked_count
from sdk.engine.pages.page_pool import PageKey
from sdk.engine.rank.kv_transfer import LayerStates
from sdk.engine.scheduling.request import RequestStatus

logger = logging.getLogger("sdk")
#: How often a hand-over without news looks for them. A look takes 10 us and stops no step.
_LOOK_S = 0.002
_KEEP_ALIVE_S = 5.0
_CLOSED = "the sender was closed"


@dataclass(frozen=True, slots=True)
class _Task:
    offer: Offer
    keys: list[PageKey]
    destination: str
    request_id: str | None
    outcome: Future[HandedOver]


class HandOverSender:
    """Sends prefixes of one engine through one connector, which it closes.

    ``max_active``: hand-overs at the same time; others wait. One that is to send what a request
    computes is not active before that request runs. ``read_bytes``: what an active one reads
    between two steps at most (one page, if that is larger), and holds in memory until it is sent.
    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(
        self,
        pages: EnginePages,
        connector: KVConnector,
        *,
        max_active: int = 4,
        read_bytes: int = 64 << 20,
    ) -> None:
        self._pages = pages
        self._connector = connector
        self._max_active = checked_count("max_active", max_active)
        self._read_bytes = checked_count("read_bytes", read_bytes)
        self._lock = threading.Lock()
        self._waiting: deque[_Task] = deque()
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()

    def hand_over(
        self,
        transfer_id: str,
        destination: str,
        token_ids: Sequence[int],
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Future[HandedOver]:
        """Send the full pages of a prompt to ``destination``: those that are cached, and those that
        the request ``request_id``, which was submitted before, computes until it ends.

        ``adapter``: the key of its adapter (``Prompt.adapter.key``). Returns at once. The result
        says how it ended. Nothing is raised if that went wrong: the receiver can compute what it
        did not get.

        :raises RequestError: the prompt has no full page, or the engine no prefix cache.
        :raises TransferError: the sender was closed, or the system has no thread left.
        """
        offer = self._pages.offer(transfer_id, token_ids, cache_salt, adapter)
        outcome: Future[HandedOver] = Future()
        outcome.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        task = _Task(offer, self._pages.keys(offer), destination, request_id, outcome)
        with self._lock:
            if self._closed.is_set():
                raise TransferError(_CLOSED)
            if len(self._threads) < self._max_active:
                thread = threading.Thread(target=self._work, name="sdk-hand-over", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise TransferError(f"no thread for a hand-over: {error}") from error
                self._threads.add(thread)  # it waits for the lock
            self._waiting.append(task)
        return outcome

    def close(self) -> None:
        """Break off all hand-overs; their results say so. Idempotent."""
        self._closed.set()
        with self._lock:
            waiting, threads = list(self._waiting), list(self._threads)
            self._waiting.clear()
        self._connector.close()
        for task in waiting:
            task.outcome.set_result(HandedOver(task.offer.transfer_id, 0, 0, _CLOSED))
        for thread in threads:
            thread.join()

    def __enter__(self) -> HandOverSender:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- the threads -----------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                task = self._waiting.popleft()
            transfer_id = task.offer.transfer_id
            try:
                if self._pages.driver.observe(partial(self._is_early, task)):
                    self._put_back(task)
                    self._closed.wait(_LOOK_S)
                    continue
                outcome = self._hand_over(task)
            except SdkError as error:
                outcome = HandedOver(transfer_id, 0, 0, str(error))
            except Exception as error:
                logger.warning("hand-over %s failed", transfer_id, exc_info=True)
                outcome = HandedOver(transfer_id, 0, 0, f"{type(error).__name__}: {error}")
            task.outcome.set_result(outcome)

    def _is_early(self, task: _Task) -> bool:
        """Whether its request has yet to run. Until then it has no thread, here or at the receiver:
        others may be due first, because the scheduler has an order of its own.
        """
        if not self._may_come(task, task.keys):
            return False
        unfinished, name = self._pages.scheduler.queues.unfinished, f"{task.request_id}"
        request = unfinished.get(name) or unfinished.get(f"{name}#0")
        waits = request is None or request.status is not RequestStatus.RUNNING
        return waits or self._may_come(task, task.keys[:1])

    def _put_back(self, task: _Task) -> None:
        """Let it wait behind the others. :raises TransferError: the sender was closed."""
        with self._lock:
            if self._closed.is_set():
                raise TransferError(_CLOSED)
            self._waiting.append(task)

    def _hand_over(self, task: _Task) -> HandedOver:
        offer = task.offer
        with closing(self._connector.open(offer, task.destination)) as sending:
            at = known = sending.num_known
            end = len(offer.token_ids) // sending.unit * sending.unit
            digests = offer.digests()
            while at < end:
                count, rows = self._next(task, sending, at, end)
                if not count:
                    break
                self._send(sending, digests, at, count, rows)
                at += count
                del rows  # before more is read
            problem = None if at >= end else f"the sender has only {at} of {end} tokens"
            if at >= end > known and not self._send_rest(task, sending, digests, end):
                problem = f"the sender has not the states or windows any more after {end} tokens"
            cached = sending.finish(at)
            if cached < at and problem is None:
                problem = f"the receiver has only {cached} of {at} tokens that it got"
            return HandedOver(offer.transfer_id, cached, known, problem)

    def _next(self, task: _Task, sending: Sending, at: int, end: int) -> tuple[int, list[Rows]]:
        """The pages from token ``at`` on that are there, in whole units: how many tokens, and the
        rows of each layer that keeps all of them. Waits for the first. 0: no more will come.
        """
        pages, size = self._pages, self._pages.page_size
        per_unit, unit_bytes = sending.unit // size, pages.group_bytes(sending.unit)

        def read() -> tuple[int, list[Rows], bool]:
            more = self._may_come(task, keys[:per_unit])
            most = self._read_bytes
            if not pages.driver.has_work:  # no step to send during: begin to send early
                most = min(most, sending.most_bytes)
            units = pages.kept.num_cached(keys) // per_unit
            if unit_bytes:
                units = min(units, max(most // unit_bytes, 1))
            count, rows = pages.kept.read_pages(keys[: units * per_unit])
            return count // per_unit * sending.unit, rows, more

        keys = task.keys[at // size : end // size]
        sent = time.monotonic()
        while True:
            # If a step of the request runs, this waits for its end, and reads before the next one.
            count, rows, more = pages.driver.between_steps(read)
            if count or not more:
                return count, rows
            self._wait(task, keys[:per_unit])
            if time.monotonic() > sent + _KEEP_ALIVE_S:
                sending.keep_alive()
                sent = time.monotonic()

    def _may_come(self, task: _Task, keys: Sequence[PageKey]) -> bool:
        """Whether these pages are not there yet, but the request may still compute them."""
        if self._pages.kept.num_cached(keys) == len(keys) or task.request_id is None:
            return False
        driver, name = self._pages.driver, task.request_id
        if any(job.request_id == name for job in driver.waiting_jobs()):
            return True  # asked first, because requests go from there to the queues
        unfinished = self._pages.scheduler.queues.unfinished
        return name in unfinished or f"{name}#0" in unfinished

    def _wait(self, task: _Task, keys: Sequence[PageKey]) -> None:
        """Until these pages are there, the request has ended, or it is time to say something."""
        ends = time.monotonic() + _KEEP_ALIVE_S
        while time.monotonic() < ends:
            if self._closed.wait(_LOOK_S):
                raise TransferError(_CLOSED)
            if not self._pages.driver.observe(lambda: self._may_come(task, keys)):
                return

    def _send_rest(self, task: _Task, sending: Sending, digests: list[bytes], end: int) -> bool:
        """Send what layers have besides pages after token ``end``; whether all of it is there."""
        pages = self._pages
        if not pages.row_bytes:
            return True
        keys = task.keys[: end // pages.page_size]
        rest = pages.driver.between_steps(lambda: pages.kept.read_rest(keys))
        if rest is None:
            return False
        digest = digests[len(keys) - 1]
        for layer, held in rest.items():
            is_state = isinstance(held, LayerStates)
            rows = held.rows[:, None] if is_state else held.rows
            first, count = 0 if is_state else end - len(rows), len(rows)
            step = max(sending.most_bytes // rows[0].nbytes, 1)
            for begin in range(0, count, step):
                sending.send(Part(layer, first + begin, rows[begin : begin + step], digest))
        return True

    def _send(
        self, sending: Sending, digests: list[bytes], at: int, count: int, found: list[Rows]
    ) -> None:
        """Send ``count`` tokens, whole units, in groups. Nothing if no layer keeps all tokens."""
        if not found:
            return
        size = self._pages.page_size
        units = max(sending.most_bytes // self._pages.group_bytes(sending.unit), 1)
        for begin in range(0, count, units * sending.unit):
            end = min(begin + units * sending.unit, count)
            digest = digests[(at + end) // size - 1]
            for layer, rows in zip(self._pages.page_layers, found, strict=True):
                sending.send(Part(layer, at + begin, rows[begin:end], digest))
