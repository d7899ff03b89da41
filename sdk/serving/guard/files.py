"""Files that several processes change: atomic replacement and a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

from sdk.api.errors import RequestError


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
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    if sync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class FileLock:
    """An exclusive lock for ``path``: on ``path.lock``, because ``path`` itself is replaced.

    It ends with the process, however that ends. ``wait``: until the other process releases it.

    :raises RequestError: another process has it, and ``wait`` is false.
    """

    def __init__(self, path: Path, *, wait: bool = False) -> None:
        lock = path.with_name(path.name + ".lock")
        self._file: int | None = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.release()
            raise RequestError(
                f"{path} is in use by another process; give each server a file of its own"
            ) from None

    def release(self) -> None:
        """Let others have it. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
