"""The bytes of one rank's swap space: whole places, byte for byte as in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdk.engine.pages.disk_space import reserved_file
from sdk.engine.plan import Swap
from sdk.kernels.kv.tiers import page_tier
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system import SYSTEM


class SwapStorage:
    """``num_slots`` slots in addition to a cache, ``regions`` uint8 ``[num_places, place_bytes]``.
    ``parts``: by region in how many slots a place is, each with an equal part of it. In a tiered
    cache a slot holds one page of the first type, two of the second or four of the third.

    Without a ``folder`` they are in main memory, which the system provides when a slot is first
    written. For a GPU that memory is pinned, and copies run in the order of its stream. With a
    folder they are in an unnamed file there, whose space is reserved now.

    What cannot be written to the file is kept in memory for copies that were already decided, and
    :meth:`unwritten` names it. A slot that cannot be read raises OSError.

    :raises OutOfMemoryError: the file cannot be created or has no room.
    """

    def __init__(
        self,
        regions: Sequence[Tensor],
        num_slots: int,
        folder: str | None = None,
        parts: Sequence[int] = (1,),
    ) -> None:
        # For slots that could not be written: the reason, until it was reported, and the content,
        # which copies that were already decided may read.
        self._failed: dict[int, str] = {}
        self._kept: dict[int, bytes] = {}
        self._on_gpu = regions[0].is_cuda
        self._place_bytes = [places.shape[1] for places in regions]
        self._part_bytes = [
            -(-nbytes // count) for nbytes, count in zip(self._place_bytes, parts, strict=False)
        ]
        self._slot_bytes = max(self._part_bytes)
        size = num_slots * self._slot_bytes
        self._file: Any = None
        if folder is not None:
            self._file = reserved_file("swap_path", folder, size, "swap space")
            size = self._slot_bytes  # buffer for copies to and from a GPU
        # On a CPU numpy copies 370 KB in 15 us; torch wakes its threads and takes 102 us.
        self._regions: list[Any] = [
            places.view(-1) if self._on_gpu else places.view(-1).numpy() for places in regions
        ]
        if self._on_gpu:
            self._memory: Any = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        else:
            self._memory = np.zeros(size, dtype=np.uint8)

    def run(self, swap: Swap) -> None:
        """Copy one place."""
        tier, index = page_tier(swap.page)
        nbytes = self._place_bytes[swap.region] >> tier
        place = self._regions[swap.region][index * nbytes : (index + 1) * nbytes]
        part = self._part_bytes[swap.region] >> tier
        for number, slot in enumerate(swap.slots):
            some = place[number * part : (number + 1) * part]
            if len(some):  # the last ones of a place that is small may be empty
                self._copy(slot, some, out=swap.out)

    def _copy(self, slot: int, place: Any, *, out: bool) -> None:
        """Copy one slot from or to a part of a place."""
        tier, index = page_tier(slot)
        begin = index * (self._slot_bytes >> tier)
        if self._file is not None:
            self._through_file(slot, place, begin, out=out)
            return
        memory = self._memory[begin : begin + len(place)]
        source, target = (place, memory) if out else (memory, place)
        if self._on_gpu:
            target.copy_(source, non_blocking=True)
        else:
            target[:] = source

    def _through_file(self, slot: int, place: Any, begin: int, *, out: bool) -> None:
        row = self._memory[: len(place)].numpy() if self._on_gpu else place
        if out:
            if self._on_gpu:
                self._memory[: len(place)].copy_(place)
            self._failed.pop(slot, None)
            self._kept.pop(slot, None)
            try:
                _write(self._file.fileno(), row.data, begin)
            except OSError as error:  # a full disk, a limit of file sizes
                self._failed[slot] = str(error)
                self._kept[slot] = row.tobytes()
            return
        if slot in self._kept:
            row[:] = np.frombuffer(self._kept[slot], row.dtype)
        else:
            _read(self._file.fileno(), row.data, begin)
        if self._on_gpu:
            place.copy_(self._memory[: len(place)])

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
        self._regions, self._memory = [], None


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
