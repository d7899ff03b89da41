"""Work that is counted instead of timed: the same on every machine and beside other programs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python the call runs in this thread, a line in a loop once for each turn.

    What compiled code does is not counted: use it where the work is Python's. It runs some ten
    times as long as without counting.
    """
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines
