"""The bytes of one rank's swap space: whole pages as they lie in the cache."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.engine.pages.disk_space import reserved_file
from sdk.engine.plan import Swap
from sdk.kernels.ladder import page_level


class SwapStorage:
    """``num_slots`` pages beside those of a cache, ``pages`` uint8 ``[num_pages, page_bytes]``; of
    a ladder those of its first type, or twice as many of each below.

    Without a ``folder`` they lie in the machine's memory (of a GPU's process: pinned, and copies
    run in the order of its stream), which the system hands out where a slot is first written. With
    one they lie in a file there without a name, whose space is reserved now.

    A page that the file does not take is kept here for the copies that were decided already, and
    :meth:`unwritten` tells which; a page that cannot be read raises OSError.

    :raises OutOfMemoryError: the file cannot be made or has no room.
    """

    def __init__(self, pages: Tensor, num_slots: int, folder: str | None = None) -> None:
        # Of slots that the file did not take: why, until that was told, and the pages, which may be
        # wanted again by the copies that were decided before.
        self._failed: dict[int, str] = {}
        self._kept: dict[int, bytes] = {}
        self._on_gpu = pages.is_cuda
        self._page_bytes = pages.shape[1]
        size = num_slots * self._page_bytes
        self._file: Any = None
        if folder is not None:
            self._file = reserved_file("swap_path", folder, size, "swap space")
            size = self._page_bytes  # the way to a GPU and back
        # Elsewhere numpy, which copies 370 KB in 15 us: torch wakes its threads and takes 102 us.
        self._pages: Any = pages.view(-1) if self._on_gpu else pages.view(-1).numpy()
        if self._on_gpu:
            self._memory: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = np.zeros(size, dtype=np.uint8)

    def run(self, swap: Swap) -> None:
        """Make this copy."""
        page, out = self._pages[self._part(swap.page)], swap.out
        part = self._part(swap.slot)
        if self._file is not None:
            self._through_file(swap.slot, page, part, out=out)
            return
        source, target = (page, self._memory[part]) if out else (self._memory[part], page)
        if self._on_gpu:
            target.copy_(source, non_blocking=True)
        else:
            target[:] = source

    def _part(self, page: int) -> slice:
        """The bytes of a page or of a slot among all."""
        level, index = page_level(page)
        size = self._page_bytes >> level
        return slice(index * size, (index + 1) * size)

    def _through_file(self, slot: int, page: Any, part: slice, *, out: bool) -> None:
        row = self._memory[: len(page)].numpy() if self._on_gpu else page
        if out:
            if self._on_gpu:
                self._memory[: len(page)].copy_(page)
            self._failed.pop(slot, None)
            self._kept.pop(slot, None)
            try:
                _write(self._file.fileno(), row.data, part.start)
            except OSError as error:  # a full disk, a limit of file sizes
                self._failed[slot] = str(error)
                self._kept[slot] = row.tobytes()
            return
        if slot in self._kept:
            row[:] = np.frombuffer(self._kept[slot], row.dtype)
        else:
            _read(self._file.fileno(), row.data, part.start)
        if self._on_gpu:
            page.copy_(self._memory[: len(page)])

    def unwritten(self) -> dict[int, str]:
        """The slots that the file did not take since the last call, and why.

        What lies in them can be had until the next call: whoever is told asks no more for it.
        """
        for slot in self._kept.keys() - self._failed.keys():
            del self._kept[slot]
        failed, self._failed = self._failed, {}
        return failed

    def close(self) -> None:
        """Give memory and file back. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._pages = self._memory = None


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
