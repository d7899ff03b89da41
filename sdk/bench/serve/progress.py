"""One line of progress that is written over, on a terminal."""

from __future__ import annotations

import sys
import time

from sdk.api.load_progress import is_terminal

#: Not more often than this: writing to a terminal takes CPU time from what is measured.
_EVERY_S = 0.25


class ProgressLine:
    """``line(text)`` shows a text on standard error if that is a terminal."""

    def __init__(self) -> None:
        self._shown = is_terminal(sys.stderr)
        self._last = 0.0

    def __call__(self, text: str) -> None:
        if self._shown and time.monotonic() - self._last > _EVERY_S:
            self._last = time.monotonic()
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the text."""
        if self._shown and self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
