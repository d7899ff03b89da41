"""Memory for large activations: mapped separately, reused in every step, unmapped at close.

The C allocator would keep memory that a thread has freed until the process ends: after a prefill of
512 tokens about 30 MiB per thread. Small tensors still come from it, because a decode step creates
hundreds of them, and this pool costs 2 us each.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch

_Array = NDArray[np.float32]

#: Tensors of at least this many bytes are mapped: a hidden state of 576 features from 114 tokens
#: on.
LARGE = 256 * 1024


class _Block:
    """Memory for at least ``count`` float32 values."""

    __slots__ = ("count", "memory")

    def __init__(self, count: int) -> None:
        self.memory = mmap.mmap(-1, max(-(-count * 4 // LARGE), 1) * LARGE)
        self.count = count

    def size(self) -> int:
        return self.count


class ActivationPool:
    """Allocates float32 tensors. Not thread-safe: for the steps of one engine.

    A block is free again when its last tensor is freed, views included. The best fitting free block
    is used. If all are too small, a new one replaces the largest of them, so that there are never
    more blocks than were once in use at the same time. With ``same_size`` a block holds tensors of
    one size only, and none is replaced.
    """

    def __init__(self, same_size: bool = False) -> None:
        self._same_size = same_size
        self._free: list[_Block] = []
        self._lent: dict[int, tuple[weakref.ref[_Array], _Block]] = {}

    def take(self, count: int) -> Tensor:
        """``count`` float32 values, uninitialized."""
        if self._same_size:
            fitting = [block for block in self._free if block.count == count]
        else:
            fitting = [block for block in self._free if block.count >= count]
        if fitting:
            block = min(fitting, key=_Block.size)
            self._free.remove(block)
        else:
            if self._free and not self._same_size:
                self._free.remove(max(self._free, key=_Block.size))
            block = _Block(count)
        array = np.frombuffer(block.memory, dtype=np.float32, count=count)
        key = id(array)

        def release(_: weakref.ref[_Array], pool: ActivationPool = self) -> None:
            pool._free.append(pool._lent.pop(key)[1])

        self._lent[key] = (weakref.ref(array, release), block)
        return torch.from_numpy(array)

    def lends(self, pointer: int) -> bool:
        """Whether a tensor whose memory begins at ``pointer`` is in use."""
        lent = (array() for array, _ in self._lent.values())
        return any(array is not None and array.ctypes.data == pointer for array in lent)

    def close(self) -> None:
        """Unmap free blocks; blocks in use follow when their tensors are freed."""
        self._free.clear()
