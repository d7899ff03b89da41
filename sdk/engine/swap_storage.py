"""The bytes of one rank's swap space: whole pages as they lie in the cache."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.engine.disk_space import reserved_file
from sdk.engine.plan import Swap


class SwapStorage:
    """``num_slots`` pages beside those of a cache, ``pages`` uint8 ``[num_pages, page_bytes]``.

    Without a ``folder`` they lie in the machine's memory (of a GPU's process: pinned, and copies
    run in the order of its stream), which the system hands out where a slot is first written. With
    one they lie in a file there without a name, whose space is reserved now.

    :raises OutOfMemoryError: the file cannot be made or has no room.
    """

    def __init__(self, pages: Tensor, num_slots: int, folder: str | None = None) -> None:
        self._pages = pages
        self._on_gpu = pages.is_cuda
        page_bytes = pages.shape[1]
        rows = 1 if folder is not None else num_slots  # of a file: the way to a GPU and back
        if self._on_gpu:
            self._memory = torch.empty((rows, page_bytes), dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = torch.from_numpy(np.zeros((rows, page_bytes), dtype=np.uint8))
        # Both for numpy, which copies 370 KB in 15 us: torch wakes its threads and takes 102 us.
        self._rows = None if self._on_gpu else (pages.numpy(), self._memory.numpy())
        self._file: Any = None
        if folder is not None:
            size = num_slots * page_bytes
            self._file = reserved_file("swap_path", folder, size, "swap space")

    def run(self, swaps: Iterable[Swap]) -> None:
        """Make these copies, one after the other."""
        for page, slot, out in swaps:
            if self._file is not None:
                self._through_file(page, slot, out=out)
            elif self._rows is not None:
                pages, slots = self._rows
                if out:
                    slots[slot] = pages[page]
                else:
                    pages[page] = slots[slot]
            elif out:
                self._memory[slot].copy_(self._pages[page], non_blocking=True)
            else:
                self._pages[page].copy_(self._memory[slot], non_blocking=True)

    def _through_file(self, page: int, slot: int, *, out: bool) -> None:
        row = self._memory[0] if self._on_gpu else self._pages[page]
        offset = slot * len(row)
        if out:
            if self._on_gpu:
                row.copy_(self._pages[page])
            _write(self._file.fileno(), row.numpy().data, offset)
        else:
            _read(self._file.fileno(), row.numpy().data, offset)
            if self._on_gpu:
                self._pages[page].copy_(row)

    def close(self) -> None:
        """Give memory and file back. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._rows = None
        self._pages = self._memory = torch.empty(0)


def _write(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], offset + done)


def _read(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        count = os.preadv(file, [data[done:]], offset + done)
        if not count:
            raise OSError(f"the swap file ends at byte {offset + done}")
        done += count
