"""Packed weights in a file: mapped, written once, read by every step and handed back after it.

The mapping is shared, so its pages belong to the system's cache of the file: dropping them from the
process loses nothing, and the system may use their memory for something else. While products run
the native code asks for the next weight's pages and hands back the last one's
(``native/file_parts.hpp``), so that the process holds little more than one weight at a time.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.cpu.library import FilePart
from sdk.kernels.errors import KernelError
from sdk.kernels.offload import OnDisk

#: Weights that turn out larger than what room was made for get it in such steps.
_STEP = 64 * 2**20
_ALIGN = 64


class WeightFile:
    """Hands out bytes of a file one after another. Not thread-safe: a model loads in one thread.

    Mapping and parts live until :meth:`close`, so that the native code may remember a part whose
    weight is gone.
    """

    def __init__(self, offload: OnDisk) -> None:
        self._file = offload.file
        self._reserved = offload.size
        self._parts: list[FilePart] = []
        # Address space for weights that come out larger; a file's end beyond what was reserved for
        # it takes no room.
        most = offload.size * 9 // 8 + _STEP
        try:
            os.ftruncate(self._file.fileno(), most)
            self._mapping = mmap.mmap(self._file.fileno(), most)
        except (OSError, ValueError) as error:
            raise KernelError(f"a file of {most} bytes for packed weights: {error}") from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        #: Bytes handed out so far.
        self.used = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """:raises KernelError: there is no more room on the disk, or more than an eighth more than
        was planned is asked for."""
        start = -(-self.used // _ALIGN) * _ALIGN
        end = start + nbytes
        if end > len(self._bytes):
            raise KernelError(
                f"packed weights: expected at most {len(self._bytes)} bytes of them in a file, "
                f"found {end}"
            )
        if end > self._reserved:
            more = min(max(end - self._reserved, _STEP), len(self._bytes) - self._reserved)
            try:
                os.posix_fallocate(self._file.fileno(), self._reserved, more)
            except OSError as error:
                raise KernelError(
                    f"packed weights: no room for {more} bytes beside the {self._reserved} of "
                    f"their file: {error}"
                ) from error
            self._reserved += more
        self.used = end
        return self._bytes[start:end]

    def part(self, start: int) -> FilePart | None:
        """What was taken since ``used`` was ``start``, as a weight of its own; None for nothing.

        Its pages are handed back, and the system begins to write them.
        """
        if start == self.used:
            return None
        part = FilePart(self._bytes.ctypes.data + start, self.used - start, 1, None)
        self._parts.append(part)
        self.hand_back(part)
        begin = part.begin - self._bytes.ctypes.data
        os.posix_fadvise(self._file.fileno(), begin, part.bytes, os.POSIX_FADV_DONTNEED)
        return part

    def experts(self, parts: list[FilePart | None]) -> FilePart | None:
        """Weights of which a product reads some, as one part."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        begin = min(part.begin for part in found)
        end = max(part.begin + part.bytes for part in found)
        whole = FilePart(begin, end - begin, 0, None)
        self._parts.append(whole)
        return whole

    def hand_back(self, part: FilePart) -> None:
        """The pages of a part leave the process; whoever looks at them has them read again."""
        first = part.begin - self._bytes.ctypes.data
        begin = first // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # advice
            self._mapping.madvise(mmap.MADV_DONTNEED, begin, first + part.bytes - begin)

    def close(self) -> None:
        """Forget the mapping, which goes with the last weight in it. Idempotent."""
        self._parts.clear()
        self._file.close()
