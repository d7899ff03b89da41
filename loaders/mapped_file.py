"""A model file in memory: checked, mapped, sliced, and its pages handed back after use.

The mapping is private (copy on write), so torch can wrap a slice without copying it and without a
warning about read-only memory, while nothing can ever write to the file. A page costs memory only
once it has been read; `release` gives the pages of a slice back after its values have been
repacked, which keeps the peak of a load near the size of the repacked weights instead of twice
that.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sdk.quant.errors import CheckpointError

#: First bytes of the text file that git leaves in place of a large file that was not downloaded.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
#: A writable private mapping counts against the system's memory commitment without this flag, and a
#: file larger than the memory is refused. Python names it from 3.13 on; Linux has it at 0x4000 on
#: these machines (asm-generic/mman.h, arch/x86).
_LINUX = sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64", "riscv64")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _LINUX else 0)


class MappedFile:
    """One regular, non-empty file mapped for reading.

    Raises:
        CheckpointError: the path is missing, is not a regular file, is empty, cannot be read, or is
            the pointer that git-lfs leaves in place of a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Asked before opening: opening a named pipe would block until somebody writes to it.
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise CheckpointError(f"{path}: the file is empty")
                self._map = _map_privately(file.fileno(), self.size)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        if self._map[: len(_LFS_POINTER)] == _LFS_POINTER:
            raise CheckpointError(
                f"{path}: a git-lfs pointer of {self.size} bytes instead of the file itself; "
                "run `git lfs pull` in its folder or download the file again"
            )

    @property
    def buffer(self) -> mmap.mmap:
        """The whole file; slicing it copies."""
        return self._map

    def view(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """``nbytes`` bytes from ``start`` as uint8, without a copy; keeps the mapping alive."""
        if start < 0 or nbytes < 0 or start + nbytes > self.size:
            raise CheckpointError(
                f"{self.path}: bytes {start} to {start + nbytes} asked for, "
                f"the file has {self.size}"
            )
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes, offset=start)

    def release(self, start: int, nbytes: int) -> None:
        """Hand the pages of a slice back to the system; a later read fetches them again.

        Only for slices nobody has written to: a changed page falls back to the file's contents.
        Pages shared with the neighbouring slices are kept.
        """
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _map_privately(descriptor: int, size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | _NO_RESERVE
    return mmap.mmap(descriptor, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
