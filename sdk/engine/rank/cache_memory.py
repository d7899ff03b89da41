"""The memory of one kind of cache: pages, the frames of a window group, or recurrent states."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from sdk.api.errors import OutOfMemoryError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system import SYSTEM

_LINE = 64  # bytes of a cache line


def _map(nbytes: int) -> mmap.mmap:
    """Zeros on huge pages, which numpy asks for too: with small ones a step at a context of 4,096
    tokens misses the TLB all the time."""
    try:
        return SYSTEM.map_private(nbytes, huge=True, reserve=False)
    except OSError as error:
        raise OutOfMemoryError(f"{nbytes} bytes for KV pages: {error}") from error


class CacheMemory:
    """``count`` places of ``nbytes`` each: one zeroed allocation, uint8 ``[count, nbytes]``.

    On a CPU the operating system backs it with memory only where something was written, and
    :meth:`vacate` returns the memory of single places. So it may have more places than there is
    memory for.

    :raises OutOfMemoryError: there is not enough memory, or address space.
    """

    def __init__(self, count: int, nbytes: int, device: torch.device) -> None:
        self.count, self.nbytes = count, nbytes
        self._mapping: mmap.mmap | None = None
        size = count * nbytes
        if device.type == "cpu" and size:
            self._mapping = _map(size)
            found = torch.from_numpy(np.frombuffer(self._mapping, np.uint8, size))
        else:
            found = _on_device(size, device)
        self.places = found.view(count, nbytes)

    @property
    def can_vacate(self) -> bool:
        """Whether the memory of single places can be returned."""
        return self._mapping is not None and SYSTEM.can_discard

    def copy(self, source: int, target: int, tier: int = 0) -> None:
        """Copy one place to another; with a ``tier``, a part as small as the pages of the tier."""
        places = self.places
        if tier:
            places = places.view(self.count << tier, self.nbytes >> tier)
        if self._mapping is None:
            places[target] = places[source]
        else:  # torch would wait for its threads: 6 ms for 360 KiB on a busy machine
            whole = places.numpy()
            whole[target] = whole[source]

    def vacate(self, places: Sequence[int]) -> None:
        """Return the memory of these places to the system: they are zeros until they are written.

        Does nothing unless ``can_vacate``, for example on a GPU.
        """
        if self._mapping is None or not self.can_vacate:
            return
        size, unit = self.nbytes, mmap.PAGESIZE
        ordered = sorted(places)
        first = 0
        for i, place in enumerate(ordered):
            if i + 1 < len(ordered) and ordered[i + 1] == place + 1:
                continue
            begin = -(-ordered[first] * size // unit) * unit
            end = (place + 1) * size // unit * unit
            if begin < end:
                SYSTEM.discard(self._mapping, begin, end - begin)
            first = i + 1

    def close(self) -> None:
        """Drop the memory. Idempotent."""
        self.places = torch.empty(0)
        self._mapping = None


def _on_device(size: int, device: torch.device) -> Tensor:
    try:
        memory = torch.zeros(size + _LINE, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"{size} bytes for KV pages: {error}") from error
    begin = -memory.data_ptr() % _LINE  # a vector that crosses cache lines loads twice
    return memory[begin : begin + size]
