"""Offloaded packed weights in a mapped file: written once, read by every step and then released.

The mapping is shared, so its pages belong to the system's cache of the file: releasing them loses
nothing, and the system may reuse their memory. While products run, the native code reads the next
weight's pages ahead and releases the previous one's (``native/file_parts.hpp``), so that the
process holds little more than one weight at a time.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.cpu.library import FilePart
from sdk.kernels.errors import KernelError
from sdk.kernels.system import SYSTEM
from sdk.kernels.weights.offload import OnDisk

#: The file grows in such steps when weights are larger than planned.
_STEP = 64 * 2**20
_ALIGN = 64


class WeightFile:
    """Hands out bytes of a file one after another. Not thread-safe: a model loads in one thread.

    Mapping and parts live until :meth:`close`, because the native code may remember a part whose
    weight is gone.
    """

    def __init__(self, offload: OnDisk) -> None:
        self._file = offload.file
        self._reserved = offload.size
        self._parts: list[FilePart] = []
        # Address space for weights that are larger than planned; the end of the file takes no disk
        # space until it is reserved.
        most = offload.size * 9 // 8 + _STEP
        try:
            os.ftruncate(self._file.fileno(), most)
            self._mapping = mmap.mmap(self._file.fileno(), most)
        except (OSError, ValueError) as error:
            raise KernelError(
                f"packed weights: cannot map a file of {most} bytes: {error}"
            ) from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._mapping, np.uint8)
        #: Bytes handed out so far.
        self.used = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """:raises KernelError: the disk is full, or the weights exceed the planned size by more
        than an eighth."""
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
                SYSTEM.reserve_space(self._file.fileno(), self._reserved, more)
            except OSError as error:
                raise KernelError(
                    f"packed weights: no disk space for {more} bytes in addition to the "
                    f"{self._reserved} of their file: {error}"
                ) from error
            self._reserved += more
        self.used = end
        return self._bytes[start:end]

    def part(self, start: int) -> FilePart | None:
        """The bytes taken since ``used`` was ``start``, as the part of one weight; None if there
        are none.

        Its pages are released, and the system begins to write them.
        """
        if start == self.used:
            return None
        part = FilePart(self._bytes.ctypes.data + start, self.used - start, 1, None)
        self._parts.append(part)
        self.release(part)
        begin = part.begin - self._bytes.ctypes.data
        SYSTEM.forget_cached(self._file.fileno(), begin, part.bytes)
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

    def release(self, part: FilePart) -> None:
        """Release the pages of a part; the next access reads them again."""
        first = part.begin - self._bytes.ctypes.data
        begin = first // mmap.PAGESIZE * mmap.PAGESIZE
        SYSTEM.release_pages(self._mapping, begin, first + part.bytes - begin)

    def close(self) -> None:
        """Forget the mapping, which is freed with its last weight. Idempotent."""
        self._parts.clear()
        self._file.close()
