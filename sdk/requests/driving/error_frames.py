"""Errors that outlive what they happened in: their tracebacks keep the variables of all calls."""

from __future__ import annotations

import traceback
from types import FrameType

#: Flags of code that may wait in the middle (generators, coroutines): to clear its frame would
#: close it, a host's coroutine that has caught the error, say. As in ``inspect``, which an engine
#: need not import.
_SUSPENDABLE = 0x20 | 0x80 | 0x200
#: Modules whose generators are context managers, which have ended with the error.
_CONTEXTS = ("sdk.engine.", "sdk.executors.", "sdk.cluster.executors.", "sdk.kernels.")


def let_go(error: BaseException) -> None:
    """Forget the variables of the calls in which an error was raised, and of their callers, which
    the frame of a call keeps.

    They keep the engine, with its files and maps, in a reference cycle with the error that one of
    them holds, until Python's collector runs.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            for frame, _ in traceback.walk_tb(one.__traceback__):
                _clear(frame)
            pending += [one.__cause__, one.__context__]


def _clear(frame: FrameType | None) -> None:
    """Up to a call that still runs, or waits in the middle."""
    while frame is not None and not _may_wait(frame):
        try:
            frame.clear()
        except RuntimeError:  # it runs, and so do those that called it
            return
        frame = frame.f_back


def _may_wait(frame: FrameType) -> bool:
    if not frame.f_code.co_flags & _SUSPENDABLE:
        return False
    return not str(frame.f_globals.get("__name__")).startswith(_CONTEXTS)
