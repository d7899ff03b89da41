"""A time limit for a part of a coroutine."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class Deadline:
    """``async with Deadline(seconds)``: cancels the block when the time is over, and raises
    ``TimeoutError``. Without a limit (``None``) it does nothing.

    Like ``asyncio.timeout``, which Python 3.10 does not have. ``asyncio.wait_for`` would make a
    task for each use, which costs more than the rest of a short request.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        #: Whether the time was over before the block ended.
        self.over = False

    async def __aenter__(self) -> Deadline:
        if self._seconds is not None:
            self._task = asyncio.current_task()
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._cancel)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.over or self._task is None:
            return
        if kind is None:
            # The block ended in the moment of the cancellation, which waits for the next await.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        others = getattr(self._task, "uncancel", int)()  # since Python 3.11
        if kind is asyncio.CancelledError and others == 0:
            raise TimeoutError from error

    def _cancel(self) -> None:
        assert self._task is not None
        self.over = True
        self._task.cancel()
