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


class ActivationPool:
    """Hands out float32 tensors of at least ``LARGE`` bytes. Not thread-safe: one engine's steps.

    A block is free again when the last tensor on it is gone, views included. The best fitting free
    block is taken; when all are too small, the largest of them gives way to a new one, so that
    there are never more blocks than were once in use together.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        self._lent: dict[int, tuple[weakref.ref[_Array], mmap.mmap]] = {}

    def take(self, count: int) -> Tensor:
        """``count`` float32 values, uninitialized."""
        nbytes = count * 4
        fitting = [block for block in self._free if len(block) >= nbytes]
        if fitting:
            block = min(fitting, key=len)
            self._free.remove(block)
        else:
            if self._free:
                self._free.remove(max(self._free, key=len))
            block = mmap.mmap(-1, -(-nbytes // LARGE) * LARGE)
        array = np.frombuffer(block, dtype=np.float32, count=count)
        key = id(array)

        def release(_: weakref.ref[_Array], pool: ActivationPool = self) -> None:
            pool._free.append(pool._lent.pop(key)[1])

        self._lent[key] = (weakref.ref(array, release), block)
        return torch.from_numpy(array)

    def close(self) -> None:
        """Unmap what is free; blocks still lent follow when their tensors go."""
        self._free.clear()
