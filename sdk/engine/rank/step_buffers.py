"""Memory that the host writes and a device reads: a step's inputs and the table of its pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LINE = 64  # bytes of a cache line
_TYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float64: torch.float64}
#: New entries of a table that are sent one by one: 64 KiB. Beyond, all of it is.
_MOST_NEW = 4096


class Buffers:
    """Arrays in one piece of memory, and the tensors of a device that are copies of them.

    On a CPU they are the same memory; to a GPU all go in one copy from pinned memory, in the order
    of the stream, so that a step reads what was written before it.
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
            self.tensors.append(self._device[begin : begin + size].view(_TYPES[dtype]).view(shape))

    @staticmethod
    def _memory(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Zeros of the host and of the device."""
        if device.type == "cuda":
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            return host, host.to(device)
        host = torch.from_numpy(np.zeros(size, np.uint8))  # there only where it was written
        return host, host

    @property
    def apart(self) -> bool:
        """Whether the device has memory of its own."""
        return self._device is not self._host

    def send(self, part: int | None = None, rows: int | None = None) -> None:
        """Copy what the arrays hold now: all, or one of them, or its first rows."""
        if not self.apart:
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
        """Until what was sent last has been read: the arrays must not be written before that."""
        if self._sent is not None:
            self._sent.synchronize()


class PageTable:
    """The pages of each row's request: int32 ``[rows, width]``, as an array and on the device.

    A step adds an entry or a few, but for 64 requests of 131,072 tokens the table has 2 MiB: only
    what is new goes to a GPU, as a list of places and pages that one launch puts there.
    """

    def __init__(self, device: torch.device, rows: int, width: int) -> None:
        most = min(_MOST_NEW, rows * width)
        self._buffers = Buffers(device, (np.int32, (rows, width)), (np.int64, (most, 2)))
        self.array, self._news = self._buffers.arrays
        self.tensor, news = self._buffers.tensors
        self._places = news[:, 0]
        self._pages = news.view(torch.int32)[:, 2]  # the lower half of each
        #: By row, the columns whose entries were not sent yet.
        self._new: dict[int, tuple[int, int]] = {}

    def write(self, row: int, begin: int, pages: Sequence[int]) -> None:
        """The pages of a row from its ``begin``-th on."""
        end = begin + len(pages)
        self.array[row, begin:end] = pages
        if self._buffers.apart:
            first, last = self._new.get(row, (begin, end))
            self._new[row] = min(first, begin), max(last, end)

    def send(self) -> None:
        """Bring what was written to the device."""
        if not self._new:
            return
        count = sum(end - begin for begin, end in self._new.values())
        if count > len(self._news):
            self._buffers.send(0)
        else:
            at, width = 0, self.array.shape[1]
            for row, (begin, end) in self._new.items():
                news = self._news[at : at + end - begin]
                news[:, 0] = np.arange(row * width + begin, row * width + end)
                news[:, 1] = self.array[row, begin:end]
                at += end - begin
            self._buffers.send(1, count)
            self.tensor.view(-1).index_copy_(0, self._places[:count], self._pages[:count])
        self._new.clear()

    def wait(self) -> None:
        """See :meth:`Buffers.wait`."""
        self._buffers.wait()
