"""Memory of packed weights: a few large mappings, on huge pages where the system has them.

A model is some hundred matrices, most of them smaller than a huge page of 2 MiB; cut one after
another from common mappings they share huge pages, whose faults and zeroing cost less at load. A
mapping goes back to the system as a whole, when the last weight in it is gone.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.kernels.errors import KernelError

_Bytes = NDArray[np.uint8]

#: Bytes of a mapping; what of it is never written costs nothing.
CHUNK = 64 * 2**20
_ALIGN = 64


class WeightMemory:
    """Hands out tensors one after another. Not thread-safe: a model loads in one thread."""

    def __init__(self) -> None:
        self._chunk: _Bytes | None = None
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor whose data starts at a multiple of 64 bytes.

        :raises KernelError: when the system has no more memory.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self._chunk is None or self._used + nbytes > self._chunk.nbytes:
            self._chunk = _mapping(max(nbytes, CHUNK))
            self._used = 0
        part = self._chunk[self._used : self._used + nbytes]
        self._used += -(-nbytes // _ALIGN) * _ALIGN
        return torch.from_numpy(part).view(dtype).view(*shape)

    def close(self) -> None:
        """Forget the current mapping; it goes with the weights in it."""
        self._chunk = None


def _mapping(nbytes: int) -> _Bytes:
    # Private: an anonymous mapping is shared by default, which never gets huge pages.
    try:
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise KernelError(f"{nbytes} bytes for packed weights: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(block, np.uint8)
