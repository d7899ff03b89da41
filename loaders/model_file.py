"""A model file: checked when it is opened, then read piece by piece into memory of our own.

Nothing is mapped. A mapped page that cannot be read, because somebody has cut the file or its disk
fails, kills the whole process with SIGBUS; a read fails with an error. The price is one more copy:
20 ms for 98 MB that the system has in memory.
"""

from __future__ import annotations

import os
import stat
import weakref
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sdk.quant.errors import CheckpointError

#: First bytes of the text file that git leaves in place of a large file that was not downloaded.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: Bytes of one read; Ctrl-C waits for its end.
_PIECE = 16 * 2**20
#: Bytes of blocks that are kept for the next reads, and the smallest block worth it. A layer of a
#: model with 3B parameters or less fits.
_KEPT, _SMALLEST = 64 * 2**20, 64 * 2**10
#: A block that as many reads did not use is given back. A layer has 7 to 12 matrices, the embedding
#: (30 MiB in a small model) comes once.
_UNUSED = 16


class ReadBlocks:
    """Memory that a model is read into, block by block.

    Matrices of the same size follow one another, each of them gone once its kernel has packed it.
    Using their memory again spares the system from clearing pages: of a folder of 270 MB in
    float16 reading takes 0.08 instead of 0.14 s.
    """

    def __init__(self) -> None:
        #: With the array that was handed out last of each (whatever shares its memory keeps it),
        #: and the number of that read.
        self._blocks: deque[tuple[memoryview, weakref.ref[NDArray[np.uint8]], int]] = deque()
        self._reads = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Uninitialized memory that nothing else refers to."""
        if not _SMALLEST <= nbytes <= _KEPT:
            return np.empty(nbytes, np.uint8)
        self._reads += 1
        while self._blocks and self._blocks[0][2] < self._reads - _UNUSED:
            self._blocks.popleft()
        for index, (block, user, _) in enumerate(self._blocks):
            if nbytes <= len(block) <= nbytes + nbytes // 8 and user() is None:
                del self._blocks[index]
                break
        else:
            block = np.empty(nbytes, np.uint8).data
        # Of a memoryview, so that views of the array refer to it and not to what is below it.
        array: NDArray[np.uint8] = np.frombuffer(block, np.uint8, nbytes)
        self._blocks.append((block, weakref.ref(array), self._reads))
        while sum(len(block) for block, *_ in self._blocks) > _KEPT:
            self._blocks.popleft()
        return array

    def clear(self) -> None:
        """Keep nothing any more."""
        self._blocks.clear()


class ModelFile:
    """One regular, non-empty file, open for reading until :meth:`close` or until it is forgotten.

    A file that is deleted or replaced (by a rename) while it is open is read to its end. One that
    is written to is an error at the next read. ``blocks`` are shared by the files of a model.

    Raises:
        CheckpointError: the path is missing, is not a regular file, is empty, cannot be read, or is
            the pointer that git-lfs leaves in place of a file.
    """

    def __init__(self, path: Path, blocks: ReadBlocks | None = None) -> None:
        self.path = path
        self._blocks = blocks or ReadBlocks()
        try:
            # Asked before opening: opening a named pipe would block until somebody writes to it.
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            self._descriptor = os.open(path, os.O_RDONLY)
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
        """``nbytes`` bytes from ``start`` as uint8, in memory of their own.

        Raises:
            CheckpointError: they lie outside of the file, cannot be read, or the file was written
                to or cut since it was opened.
        """
        if start < 0 or nbytes < 0 or start + nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: bytes {start} to {start + nbytes} asked for, "
                f"the file has {self.size}"
            )
        if not self._close.alive:
            raise CheckpointError(f"{self.path}: the file is closed")
        data = self._blocks.take(nbytes)
        view, done = data.data, 0
        try:
            while done < nbytes:
                piece = view[done : done + _PIECE]
                count = os.preadv(self._descriptor, [piece], start + done)
                if not count:  # it was cut: said below
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

    def close(self) -> None:
        """What was read stays. Idempotent."""
        self._close()
        self._blocks.clear()
