"""The bytes of one rank's swap space: whole pages, byte for byte as in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdk.engine.pages.disk_space import reserved_file
from sdk.engine.plan import Swap
from sdk.kernels.kv_tiers import page_tier
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system import SYSTEM


class SwapStorage:
    """``num_slots`` pages in addition to those of a cache, ``pages`` uint8 ``[num_pages,
    page_bytes]``. In a tiered cache a slot holds one page of the first type, two of the second or
    four of the third.

    Without a ``folder`` they are in main memory, which the system provides when a slot is first
    written. For a GPU that memory is pinned, and copies run in the order of its stream. With a
    folder they are in an unnamed file there, whose space is reserved now.

    A page that cannot be written to the file is kept in memory for copies that were already
    decided, and :meth:`unwritten` names it. A page that cannot be read raises OSError.

    :raises OutOfMemoryError: the file cannot be created or has no room.
    """

    def __init__(self, pages: Tensor, num_slots: int, folder: str | None = None) -> None:
        # For slots that could not be written: the reason, until it was reported, and the page,
        # which copies that were already decided may read.
        self._failed: dict[int, str] = {}
        self._kept: dict[int, bytes] = {}
        self._on_gpu = pages.is_cuda
        self._page_bytes = pages.shape[1]
        size = num_slots * self._page_bytes
        self._file: Any = None
        if folder is not None:
            self._file = reserved_file("swap_path", folder, size, "swap space")
            size = self._page_bytes  # buffer for copies to and from a GPU
        # On a CPU numpy copies 370 KB in 15 us; torch wakes its threads and takes 102 us.
        self._pages: Any = pages.view(-1) if self._on_gpu else pages.view(-1).numpy()
        if self._on_gpu:
            self._memory: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = np.zeros(size, dtype=np.uint8)

    def run(self, swap: Swap) -> None:
        """Copy one page."""
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
        """The bytes of a page or slot within all of them."""
        tier, index = page_tier(page)
        size = self._page_bytes >> tier
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
        """The slots that could not be written to the file since the last call, and why.

        Their pages can be read until the next call; the caller plans no further reads of them.
        """
        for slot in self._kept.keys() - self._failed.keys():
            del self._kept[slot]
        failed, self._failed = self._failed, {}
        return failed

    def close(self) -> None:
        """Free the memory and the file. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._pages = self._memory = None


def _write(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += SYSTEM.write_at(file, data[done:], offset + done)


def _read(file: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        count = SYSTEM.read_at(file, data[done:], offset + done)
        if not count:
            raise OSError(f"the swap file ends at byte {offset + done}")
        done += count
