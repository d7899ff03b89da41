"""Takes prefixes that other engines hand over, and puts them into the prefix cache.

A group of parts is checked and then written between two steps, in as many pages at a time as keep
running requests at their pace. Pages have an owner only while they are written. After that they are
cached like those of an ended request, so whatever happens to a hand-over, nothing is left to clean
up in the engine, and no request gets fewer pages because of it.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from sdk.api.errors import RequestError, SdkError, TransferError
from sdk.cluster.transfer.connector import KVListener, KVSource, Receiving
from sdk.cluster.transfer.engine_pages import EnginePages, HandedOver, checked_count
from sdk.cluster.transfer.intake import Intake, Pace
from sdk.quant.safe_repr import safe_repr

logger = logging.getLogger("sdk")
_CLOSED = "the receiver was closed"
#: Results that nobody has asked for are kept until there are this many newer ones.
_MOST_RESULTS = 1024


class HandOverReceiver:
    """Receives prefixes for one engine through one listener, which it closes.

    ``max_active``: hand-overs at the same time; others wait. ``group_bytes``: how much of each is
    in memory, apart from the pages (one page, if that is larger). ``step_share``: how much longer
    receiving and writing may make the steps of running requests. Use it as a context manager, or
    call :meth:`close`.
    """

    def __init__(
        self,
        pages: EnginePages,
        listener: KVListener | None = None,
        *,
        max_active: int = 4,
        group_bytes: int = 4 << 20,
        step_share: float = 0.1,
    ) -> None:
        if not isinstance(step_share, int | float) or not 0 < step_share <= 1:
            raise RequestError(f"step_share: expected 0 to 1, found {safe_repr(step_share)}")
        self._pages = pages
        self._listener = listener
        self._group_bytes = checked_count("group_bytes", group_bytes)
        self._slots = threading.Semaphore(checked_count("max_active", max_active))
        self._pace = Pace(pages, step_share)
        self._lock = threading.Lock()
        self._outcomes: OrderedDict[str, Future[HandedOver]] = OrderedDict()
        self._active: dict[threading.Thread, Receiving] = {}
        self._closed = False
        self._thread: threading.Thread | None = None
        if listener is not None:
            self._thread = threading.Thread(
                target=self._accept, args=(listener,), name="sdk-hand-over", daemon=True
            )
            self._thread.start()

    def result(self, transfer_id: str) -> Future[HandedOver]:
        """How the hand-over with this id ends, or has ended. There may be none yet; wait for it
        with a timeout. It never raises: what is missing is computed like any prompt.
        """
        with self._lock:
            return self._outcome(transfer_id)

    def fetch(
        self,
        source: KVSource,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> HandedOver:
        """Get what a store has of a prompt. Waits for it.

        :raises RequestError: the prompt has no full page, or the engine no prefix cache.
        """
        offer = self._pages.offer("fetch", token_ids, cache_salt, adapter)
        try:
            receiving = source.fetch(offer)
        except TransferError as error:
            return HandedOver(offer.transfer_id, 0, 0, str(error))
        try:
            result = self._receive(receiving)
        finally:
            receiving.close()
        wanted = len(offer.token_ids)
        if result.problem is None and result.num_tokens < wanted:  # it has a beginning
            problem = f"the sender had only {result.num_tokens} of {wanted} tokens"
            result = result._replace(problem=problem)
        return result

    def close(self) -> None:
        """Break off all hand-overs; their results say so. Idempotent."""
        with self._lock:
            self._closed = True
            active = dict(self._active)
        if self._listener is not None:
            self._listener.close()
        for receiving in active.values():
            receiving.close()
        for thread in active:
            thread.join()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            for transfer_id, outcome in self._outcomes.items():
                if not outcome.done():
                    outcome.set_result(HandedOver(transfer_id, 0, 0, _CLOSED))

    def __enter__(self) -> HandOverReceiver:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- results ---------------------------------------------------------------------------------

    def _outcome(self, transfer_id: str) -> Future[HandedOver]:
        """With the lock."""
        outcome = self._outcomes.get(transfer_id)
        if outcome is None:
            outcome = self._outcomes[transfer_id] = Future()
            outcome.set_running_or_notify_cancel()  # from now on it cannot be cancelled
            if self._closed:
                outcome.set_result(HandedOver(transfer_id, 0, 0, _CLOSED))
            if len(self._outcomes) > _MOST_RESULTS:
                oldest, forgotten = self._outcomes.popitem(last=False)
                if not forgotten.done():
                    problem = f"{_MOST_RESULTS} other hand-overs came first"
                    forgotten.set_result(HandedOver(oldest, 0, 0, problem))
        return outcome

    def _ended(self, result: HandedOver) -> None:
        with self._lock:
            if self._outcome(result.transfer_id).done():  # the same once more
                del self._outcomes[result.transfer_id]
            if not (outcome := self._outcome(result.transfer_id)).done():
                outcome.set_result(result)

    # ---- the threads -----------------------------------------------------------------------------

    def _accept(self, listener: KVListener) -> None:
        while True:
            self._slots.acquire()
            receiving = listener.accept()
            if receiving is None:
                return
            thread = threading.Thread(
                target=self._serve, args=(receiving,), name="sdk-hand-over", daemon=True
            )
            with self._lock:
                try:
                    if not self._closed:
                        thread.start()
                        self._active[thread] = receiving
                        continue
                except RuntimeError as error:
                    logger.warning("a hand-over is refused, no thread for it: %s", error)
            receiving.close()
            self._slots.release()

    def _serve(self, receiving: Receiving) -> None:
        try:
            result = self._receive(receiving)
            if result.problem is not None:
                logger.info("hand-over %s: %s", result.transfer_id, result.problem)
            self._ended(result)
        except TransferError as error:
            logger.info("a hand-over was not begun: %s", error)
        except Exception:
            logger.warning("a hand-over failed", exc_info=True)
        finally:
            receiving.close()
            with self._lock:
                self._active.pop(threading.current_thread(), None)
            self._slots.release()

    def _receive(self, receiving: Receiving) -> HandedOver:
        """:raises TransferError: before it is known what is offered."""
        offer = receiving.offer()
        intake = Intake(self._pages, self._pace, offer, self._group_bytes)
        problem = None
        try:
            intake.accept(receiving)
            intake.take(receiving)
        except SdkError as error:
            problem = str(error)
        except Exception as error:
            logger.warning("hand-over %s failed", offer.transfer_id, exc_info=True)
            problem = f"{type(error).__name__}: {error}"
        return HandedOver(offer.transfer_id, intake.num_tokens, intake.num_known, problem)
