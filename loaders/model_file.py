"""A model file: checked when it is opened, then read piece by piece into allocated memory.

Nothing is mapped. If a mapped page cannot be read, because the file was truncated or its disk
fails, SIGBUS kills the whole process; a failing read raises an error. The price is one more copy:
20 ms for 98 MB in the page cache.
"""

from __future__ import annotations

import os
import stat
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.system import SYSTEM
from sdk.kernels.system.blocks import MemoryBlocks
from sdk.quant.errors import CheckpointError

#: First bytes of the text file that git-lfs leaves in place of a file that was not downloaded.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: Bytes per read; Ctrl-C takes effect after a read.
_PIECE = 16 * 2**20


class ModelFile:
    """A regular, non-empty file, open for reading until :meth:`close` or garbage collection.

    A file that is deleted or replaced (by a rename) while open can still be read to its end. If it
    is written to, the next read raises. ``blocks`` are shared by the files of a model.

    Raises:
        CheckpointError: the path is missing, not a regular file, empty or unreadable, or is a
            git-lfs pointer.
    """

    def __init__(self, path: Path, blocks: MemoryBlocks | None = None) -> None:
        self.path = path
        self._blocks = blocks or MemoryBlocks()
        try:
            # Checked before opening: opening a named pipe would block until there is a writer.
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            self._descriptor = SYSTEM.open_file(path, os.O_RDONLY)
            self._close = weakref.finalize(self, os.close, self._descriptor)
            self._opened = os.fstat(self._descriptor)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self.size = self._opened.st_size
        if self.size == 0:
            raise CheckpointError(f"{path}: the file is empty")
        if self.read(0, min(len(_LFS_POINTER), self.size)).tobytes() == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: a git-lfs pointer of {self.size} bytes instead of the file itself; "
                "run `git lfs pull` in its folder or download the file again"
            )

    def read(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """``nbytes`` bytes from ``start`` as uint8, in memory that nothing else uses.

        Raises:
            CheckpointError: they are outside the file or cannot be read, or the file was written to
                or truncated since it was opened.
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: bytes {start} to {start + nbytes} are needed, "
                f"the file has {self.size}"
            )
        if not self._close.alive:
            raise CheckpointError(f"{self.path}: the file is closed")
        data = self._blocks.take(nbytes)
        view, done = data.data, 0
        try:
            while done < nbytes:
                piece = view[done : done + _PIECE]
                count = SYSTEM.read_at(self._descriptor, piece, start + done)
                if not count:  # truncated: raises below
                    break
                done += count
            found = os.fstat(self._descriptor)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: bytes {start} to {start + nbytes} cannot be read: {error}"
            ) from error
        if done < nbytes or found.st_size < self.size:
            raise CheckpointError(
                f"{self.path}: truncated while it was read: it had {self.size} bytes when it was "
                f"opened and has {found.st_size} now; load it again when it is complete"
            )
        if (found.st_size, found.st_mtime_ns) != (self.size, self._opened.st_mtime_ns):
            raise CheckpointError(
                f"{self.path}: written to while it was read; load it again when it is complete"
            )
        return data

    @property
    def descriptor(self) -> int:
        """Of the open file; it is closed by :meth:`close`."""
        return self._descriptor

    def close(self) -> None:
        """Close the file; data already read stays valid. Idempotent."""
        self._close()
        self._blocks.clear()
