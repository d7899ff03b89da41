"""Memory of large activations: mapped for them alone, reused from step to step, unmapped at close.

The C allocator would serve them too, but it keeps what a thread has freed: after a prefill of 512
tokens about 30 MiB a thread, until the process ends. Small tensors still come from it, because a
decode step makes hundreds of them and this costs 2 us each.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Array = NDArray[np.float32]

#: Bytes from which a tensor is mapped: a hidden state of 576 features from 114 tokens on.
LARGE = 256 * 1024


class _Block:
    """Memory for at least ``count`` numbers."""

    __slots__ = ("count", "memory")

    def __init__(self, count: int) -> None:
        self.memory = mmap.mmap(-1, -(-count * 4 // LARGE) * LARGE)
        self.count = count

    def size(self) -> int:
        return self.count


class ActivationPool:
    """Hands out float32 tensors. Not thread-safe: one engine's steps.

    A block is free again when the last tensor on it is gone, views included. The best fitting free
    block is taken; when all are too small, the largest of them gives way to a new one, so that
    there are never more blocks than were once in use together. With ``same_size`` a block only ever
    holds tensors of one size, and none gives way.
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

    def close(self) -> None:
        """Unmap what is free; blocks still lent follow when their tensors go."""
        self._free.clear()
