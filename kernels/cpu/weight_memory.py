"""Memory of packed weights: a few large mappings, on huge pages where the system has them.

Offloaded weights go to a file instead (``weight_file.py``).

A model has a few hundred matrices, most of them smaller than a huge page of 2 MiB. Taken one after
another from common mappings they share huge pages, whose faults and zeroing cost less at load. A
mapping is freed as a whole, when its last weight is gone. Before that a weight takes the place of
one of the same size that is gone: experts are exchanged while a model runs.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.cpu.weight_file import WeightFile
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system import SYSTEM
from sdk.kernels.weights.offload import OnDisk

_Bytes = NDArray[np.uint8]
_Place = tuple[mmap.mmap, int]

#: Bytes of a mapping; pages that are never written cost nothing.
MAPPING_BYTES = 64 * 2**20
_ALIGN = 64
_HUGE_PAGE = 2 * 2**20


class WeightMemory:
    """Hands out tensors one after another. Not thread-safe: a model loads in one thread."""

    def __init__(self, offload: OnDisk | None = None) -> None:
        self._mapping: mmap.mmap | None = None
        self._used = self._populated = 0
        #: Where weights were that are gone, by their bytes. ``None``: closed.
        self._free: dict[int, list[_Place]] | None = defaultdict(list)
        self._room = 0 if offload is None else offload.stays
        #: Experts of a model that is larger than memory: an ``ExpertCache``, whose module imports
        #: this one.
        self.experts: Any = None
        #: For weights beyond the bytes that may stay in memory.
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
        if self._free is not None and (places := self._free.get(nbytes)):
            return self._weight(*places.pop(), shape, dtype)
        if self._mapping is None or self._used + nbytes > len(self._mapping):
            self._mapping = _map(max(nbytes, MAPPING_BYTES))
            self._used = self._populated = 0
        start, end = self._used, self._used + nbytes
        if end > self._populated:
            whole = min(-(-end // _HUGE_PAGE) * _HUGE_PAGE, len(self._mapping))
            SYSTEM.populate(self._mapping, self._populated, whole)
            self._populated = whole
        self._used = -(-end // _ALIGN) * _ALIGN
        return self._weight(self._mapping, start, shape, dtype)

    def _weight(
        self, mapping: mmap.mmap, start: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        part = np.frombuffer(mapping, np.uint8, math.prod(shape) * dtype.itemsize, start)
        gone = weakref.finalize(part, _give_back, weakref.ref(self), part.nbytes, (mapping, start))
        gone.atexit = False
        return _tensor(part, shape, dtype)

    def keep(self, tensor: Tensor | None) -> Tensor | None:
        """``tensor``, or its copy in the file if weights are offloaded."""
        if tensor is None or self.file is None:
            return tensor
        kept = self.take(tensor.shape, tensor.dtype)
        kept.copy_(tensor)
        return kept

    def close(self) -> None:
        """Forget the current mapping, which is freed with its weights. With a file, no product may
        run after this."""
        self._mapping = self._free = None
        if self.experts is not None:
            self.experts.close()
            self.experts = None
        if self.file is not None:
            self.file.close()


def _give_back(memory: weakref.ref[WeightMemory], nbytes: int, place: _Place) -> None:
    found = memory()
    if found is not None and found._free is not None:
        found._free[nbytes].append(place)


def _tensor(part: _Bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(part).view(dtype).view(*shape)


def _map(nbytes: int) -> mmap.mmap:
    try:
        return SYSTEM.map_private(nbytes, huge=True)
    except OSError as error:
        raise KernelError(f"packed weights: cannot map {nbytes} bytes: {error}") from error
