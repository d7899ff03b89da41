"""Memory of packed weights: a few large mappings, on huge pages where the system has them.

What is not to stay in memory goes to a file instead (``weight_file.py``).

A model is some hundred matrices, most of them smaller than a huge page of 2 MiB; cut one after
another from common mappings they share huge pages, whose faults and zeroing cost less at load. A
mapping goes back to the system as a whole, when the last weight in it is gone.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.kernels.cpu.weight_file import WeightFile
from sdk.kernels.errors import KernelError
from sdk.kernels.offload import OnDisk

_Bytes = NDArray[np.uint8]

#: Bytes of a mapping; what of it is never written costs nothing.
CHUNK = 64 * 2**20
_ALIGN = 64
_HUGE_PAGE = 2 * 2**20
#: Linux's MADV_POPULATE_WRITE (5.14), which the mmap module does not name.
_POPULATE_WRITE = 23


class WeightMemory:
    """Hands out tensors one after another. Not thread-safe: a model loads in one thread."""

    def __init__(self, offload: OnDisk | None = None) -> None:
        self._mapping: mmap.mmap | None = None
        self._used = self._populated = 0
        self._room = 0 if offload is None else offload.stays
        #: Of weights that do not fit into the bytes that may stay in memory.
        self.file = None if offload is None else WeightFile(offload)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor whose data starts at a multiple of 64 bytes.

        :raises KernelError: when the system has no more memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self.file is not None:
            if nbytes > self._room:
                return _tensor(self.file.take(nbytes), shape, dtype)
            self._room -= nbytes
        if self._mapping is None or self._used + nbytes > len(self._mapping):
            self._mapping = _map(max(nbytes, CHUNK))
            self._used = self._populated = 0
        start, end = self._used, self._used + nbytes
        if end > self._populated:
            whole = min(-(-end // _HUGE_PAGE) * _HUGE_PAGE, len(self._mapping))
            _populate(self._mapping, self._populated, whole)
            self._populated = whole
        self._used = -(-end // _ALIGN) * _ALIGN
        return _tensor(np.frombuffer(self._mapping, np.uint8, nbytes, start), shape, dtype)

    def keep(self, tensor: Tensor | None) -> Tensor | None:
        """``tensor``, or where weights have to go to the file its copy there."""
        if tensor is None or self.file is None:
            return tensor
        kept = self.take(tensor.shape, tensor.dtype)
        kept.copy_(tensor)
        return kept

    def close(self) -> None:
        """Forget the current mapping; it goes with the weights in it. No product may run any more
        where there is a file."""
        self._mapping = None
        if self.file is not None:
            self.file.close()


def _tensor(part: _Bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(part).view(dtype).view(*shape)


def _map(nbytes: int) -> mmap.mmap:
    # Private: an anonymous mapping is shared by default, which never gets huge pages.
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise KernelError(f"{nbytes} bytes for packed weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _populate(mapping: mmap.mmap, start: int, end: int) -> None:
    """Have the system give and clear these pages now, in one call: 64 MiB take 3 to 5 ms. Two
    threads that pack into pages which are not there yet took 80 ms more for 94 MiB."""
    if sys.platform != "linux":
        return
    # An older system does not know it, one short of memory refuses: pages then come one by one.
    with contextlib.suppress(OSError):
        mapping.madvise(_POPULATE_WRITE, start, end - start)
