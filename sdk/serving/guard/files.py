"""Files that several processes change: atomic replacement and a lock."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from sdk.api.errors import RequestError
from sdk.kernels.system import SYSTEM


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write ``data`` to ``path``, readable by its owner only (mode 0600).

    Readers see the old file or the new one, never a part. ``sync``: wait until it is on the disk.
    """
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(number, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        SYSTEM.replace_file(Path(name), path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    if sync:
        SYSTEM.sync_folder(path.parent)


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
