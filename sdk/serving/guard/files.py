"""Files that several processes change: a lock for each."""

from __future__ import annotations

import os
from pathlib import Path

from sdk.api.errors import RequestError
from sdk.kernels.system import SYSTEM


class FileLock:
    """An exclusive lock for ``path``: on ``path.lock``, because ``path`` itself is replaced.

    It ends with the process, however that ends. ``wait``: until the other process releases it.

    :raises RequestError: another process has it, and ``wait`` is false.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        lock = path.with_name(path.name + ".lock")
        self._file: int | None = SYSTEM.open_file(lock, os.O_RDWR | os.O_CREAT)
        if not SYSTEM.lock_file(self._file, wait=wait):
            self.release()
            raise RequestError(
                f"{path} is in use by another process; give each server a file of its own"
            )

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
