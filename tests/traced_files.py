"""Which files of ours run: for tests of how far a token or a call travels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDERS = ("sdk", "kernels", "models", "loaders", "quant")


def own_file(filename: str) -> str | None:
    """The path in the repository of a module of ours; ``None`` for other code."""
    for folder in FOLDERS:
        _, found, rest = filename.rpartition(f"/sdk/{folder}/")
        if found:
            return f"{folder}/{rest}"
    _, found, rest = filename.rpartition("/sdk/")
    path = f"sdk/{rest}" if found else filename.removeprefix(f"{ROOT}/")
    return path if path.startswith(FOLDERS) and (ROOT / path).is_file() else None


class FileTrace:
    """The files whose functions were called while it was ``on``, in any thread."""

    def __init__(self) -> None:
        self.on = False
        self._seen: set[str] = set()

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call":
            self._seen.add(frame.f_code.co_filename)

    @property
    def files(self) -> set[str]:
        return {name for name in map(own_file, self._seen) if name is not None}


@contextmanager
def traced_files() -> Iterator[FileTrace]:
    """Traces this thread, and those that start inside."""
    trace = FileTrace()
    threading.setprofile(trace.profile)
    sys.setprofile(trace.profile)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
