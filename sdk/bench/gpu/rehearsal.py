"""Runs rows in parallel before they are timed, so that all cores compile kernels.

Several hundred variants of kernels take a second or more each to compile, one after another in a
single measuring process. A rehearsal leaves them in Triton's cache on the disk, where the measuring
process finds them. Nothing is timed, because the rows share the card.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import Any

from sdk.api.errors import SdkError
from sdk.bench.gpu.process import NoCard, Worker
from sdk.bench.gpu.rows import Row
from sdk.kernels.system import SYSTEM


class Rehearsal:
    """Runs ``rows`` in as many processes as there are CPUs, for ``seconds`` at most.

    ``left_out``: the rows that were not rehearsed to their end, and why.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        seconds: float,
        log: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        open_worker: Callable[..., Any] = Worker,
    ) -> None:
        self.left_out: dict[str, str] = {}
        # the longest row last, where pop() takes it first
        self._waiting = sorted((row for row in rows if row.rehearsed), key=lambda row: row.seconds)
        self._end = clock() + seconds
        self._log = log
        self._clock = clock
        self._open_worker = open_worker
        self._lock = Lock()
        self._workers: list[Any] = []

    def run(self) -> None:
        """Return when all rows are done or the time is over. Does nothing under the interpreter,
        which compiles nothing.

        :raises NoCard: there is no GPU.
        """
        if not self._waiting or self._clock() >= self._end:
            self._give_up("no time to rehearse it")
            return
        first = self._open()
        try:
            if first.hello(self._end - self._clock())["tiny"]:
                self._waiting.clear()
        except NoCard:
            first.close()
            raise
        except SdkError:  # the first row reports it again
            first.close()
            first = None
        count = min(len(self._waiting), SYSTEM.num_cpus()) or 1
        workers = [first, *[None] * (count - 1)]
        threads = [Thread(target=self._rehearse, args=(w,), daemon=True) for w in workers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            self._waiting.clear()
            with self._lock:
                for worker in self._workers:
                    worker.kill()
            raise

    def _give_up(self, why: str) -> None:
        while self._waiting:
            self.left_out[self._waiting.pop().name] = why

    def _open(self) -> Any:
        with self._lock:
            worker = self._open_worker({}, self._log, rehearsing=True)
            self._workers.append(worker)
        return worker

    def _rehearse(self, worker: Any) -> None:
        """Run rows in one thread, in a process that is replaced if it is lost."""
        while (row := self._next()) is not None:
            left = self._end - self._clock()
            if left <= 0:
                self.left_out[row.name] = "no time to rehearse it"
                continue
            try:
                if worker is None:
                    worker = self._open()
                    worker.hello(left)
                lost = self._row(worker, row)
            except SdkError as error:
                self.left_out[row.name] = str(error)
                lost = True
            if lost and worker is not None:
                worker.close()
                worker = None
        if worker is not None:
            worker.close()

    def _next(self) -> Row | None:
        with self._lock:
            return self._waiting.pop() if self._waiting else None

    def _row(self, worker: Any, row: Row) -> bool:
        """Run one row; returns whether the process was lost."""
        for answer in worker.answers(row.name, self._end - self._clock()):
            if answer.get("done") is not None:
                self.left_out[row.name] = answer["done"]
        return bool(answer.get("lost"))
