"""Memory that the host writes and a device reads: a step's inputs and its page table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch

_LINE = 64  # bytes of a cache line
#: New page table entries that are sent one by one (64 KiB). With more, the whole table is sent.
_MAX_UPDATES = 4096


class Buffers:
    """Arrays of the host in one block of memory, and their copies as tensors of a device.

    On a CPU both are the same memory. To a GPU the whole block goes in one copy from pinned memory,
    in the order of the stream, so that a step reads what was written before its launch.
    """

    def __init__(self, device: torch.device, *parts: tuple[type[Any], tuple[int, ...]]) -> None:
        self._offsets = [0]
        for dtype, shape in parts:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self._offsets.append(self._offsets[-1] + -(-size // _LINE) * _LINE)
        self._host, self._device = self._memory(self._offsets[-1], device)
        self._sent: Any = None
        if device.type == "cuda":
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.arrays: list[NDArray[Any]] = []
        self.tensors: list[Tensor] = []
        for (dtype, shape), begin in zip(parts, self._offsets, strict=False):
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self.arrays.append(self._host.numpy()[begin : begin + size].view(dtype).reshape(shape))
            stored = getattr(torch, np.dtype(dtype).name)
            self.tensors.append(self._device[begin : begin + size].view(stored).view(shape))

    @staticmethod
    def _memory(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Zeroed memory of the host and of the device."""
        if device.type == "cuda":
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            return host, host.to(device)
        host = torch.from_numpy(np.zeros(size, np.uint8))  # uses physical memory only where written
        return host, host

    @property
    def separate(self) -> bool:
        """Whether the device's memory is separate from the host's."""
        return self._device is not self._host

    def send(self, part: int | None = None, rows: int | None = None) -> None:
        """Copy the arrays to the device: all, or one ``part``, or its first ``rows``."""
        if not self.separate:
            return
        bytes_ = slice(None)
        if part is not None:
            array = self.arrays[part]
            size = array.nbytes if rows is None else array[:rows].nbytes
            bytes_ = slice(self._offsets[part], self._offsets[part] + size)
        self._device[bytes_].copy_(self._host[bytes_], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Wait until the last copy is done. The arrays must not be written before that."""
        if self._sent is not None:
            self._sent.synchronize()


class PageTable:
    """The pages of each row's request: int32 ``[rows, width]``, as an array and on the device.

    A step adds few entries, while the table of 64 requests of 131,072 tokens takes 2 MiB. So only
    new entries are sent to a GPU, as pairs of position and page, which one launch writes to the
    table.
    """

    def __init__(self, device: torch.device, rows: int, width: int) -> None:
        most = min(_MAX_UPDATES, rows * width)
        self._buffers = Buffers(device, (np.int32, (rows, width)), (np.int64, (most, 2)))
        self.array, self._updates = self._buffers.arrays
        self.tensor, updates = self._buffers.tensors
        self._positions = updates[:, 0]
        self._pages = updates.view(torch.int32)[:, 2]  # the lower half of each
        #: By row: the range of columns whose entries were not sent yet.
        self._unsent: dict[int, tuple[int, int]] = {}

    def write(self, row: int, begin: int, pages: Sequence[int]) -> None:
        """Write pages to a row, from column ``begin`` on."""
        end = begin + len(pages)
        self.array[row, begin:end] = pages
        if self._buffers.separate:
            first, last = self._unsent.get(row, (begin, end))
            self._unsent[row] = min(first, begin), max(last, end)

    def send(self) -> None:
        """Send new entries to the device."""
        if not self._unsent:
            return
        count = sum(end - begin for begin, end in self._unsent.values())
        if count > len(self._updates):
            self._buffers.send(0)
        else:
            at, width = 0, self.array.shape[1]
            for row, (begin, end) in self._unsent.items():
                updates = self._updates[at : at + end - begin]
                updates[:, 0] = np.arange(row * width + begin, row * width + end)
                updates[:, 1] = self.array[row, begin:end]
                at += end - begin
            self._buffers.send(1, count)
            self.tensor.view(-1).index_copy_(0, self._positions[:count], self._pages[:count])
        self._unsent.clear()

    def wait(self) -> None:
        """See :meth:`Buffers.wait`."""
        self._buffers.wait()
