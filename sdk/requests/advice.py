"""Advice to whoever wrote the call: a Python warning, at most once for each ``LLM`` and topic.

These are warnings and not log lines because nobody reads the log of a library that seems to work.
They go where the host's warning filters send them, and name the line of the caller.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

#: The call to use instead of one that stops the event loop.
_TWINS = {
    "stream": "async for piece in llm.astream(...)",
    "as_completed": "async for index, output in llm.as_completed(...)",
    "wait_for_completion": "await llm.agenerate(...)",
    "beam_search": "await AsyncLLM(llm).beam_search(...)",
    "snapshot": "await asyncio.to_thread(llm.snapshot, ...)",
    "pin": "await asyncio.to_thread(llm.pin, ...)",
}
_OURS = ("sdk", "embedlm")


class Advice:
    """What one ``LLM`` has already said."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def once(self, topic: str, text: str, category: type[Warning] = UserWarning) -> None:
        """Warn with ``text``, unless something was said about ``topic``."""
        if self.is_new(topic):
            warnings.warn(text, category, stacklevel=_caller_level())

    def is_new(self, topic: str) -> bool:
        """Whether nothing was said about ``topic`` before; now something is."""
        if topic in self._given:
            return False
        self._given.add(topic)  # before the warning, which a filter may turn into an exception
        return True

    def blocking(self, method: str) -> None:
        """Warn if ``method``, which waits for the engine, was called by a coroutine.

        Not in a cell of a notebook: IPython's kernel runs cells in its event loop, which waits for
        each of them anyway, so that a call that waits is the normal one there.
        """
        if "loop" in self._given or not _loop_runs() or _in_a_cell():
            return
        twin = _TWINS.get(method, f"await llm.a{method}(...)")
        self.once(
            "loop",
            f"{method}() was called in a running event loop, which stands still until it returns; "
            f"use `{twin}`, or call it in a thread (asyncio.to_thread)",
            RuntimeWarning,
        )


def _loop_runs() -> bool:
    """Whether an asyncio loop runs in this thread."""
    asyncio = sys.modules.get("asyncio")  # a program without loops need not import it: 20 ms
    return asyncio is not None and asyncio._get_running_loop() is not None


def _in_a_cell() -> bool:
    """Whether the code that runs was called by a cell of IPython."""
    if "IPython" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "IPython.core.interactiveshell":
            return True
        frame = frame.f_back
    return False


def _caller_level() -> int:
    """The ``stacklevel`` of the first caller that is no part of this library, counted from the
    function that called this one."""
    level, frame = 1, sys._getframe(1)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level
