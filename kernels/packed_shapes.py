"""Shapes and masks in tensors of fixed address and size, for kernels on a device."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.sampling import Change, Mask, SampleBuffers

#: int32 values in 64 bytes, to which each part is aligned: Triton recompiles for other alignments.
_LINE = 16
#: Values of a slot: its first change, the one after its last, its two masks (-1: none).
SLOT = 4
#: Values of a change: kind, first entry, the one after its last; the bits of its three factors.
CHANGE = 6
#: Values of an entry: the id, the bits of its value.
ENTRY = 2
#: Room per row for changes, for the tokens that they name (32 KiB), and for masks.
CHANGES, ENTRIES, MASKS = 8, 4096, 2


class PackedShapes:
    """Shapes and masks of up to ``rows`` rows of ``width`` logits, in bounded memory.

    int32 tensors: ``owners [rows]`` (a row's slot, -1: unchanged), ``slots [S, 4]``, ``changes
    [C, 6]``, ``entries [E, 2]`` and ``masks [M, words]``, all in one allocation; ``side`` float32
    ``[S, width]`` for the changed rows. ``sizes``: S, C, E and M.

    On a CPU :meth:`pack` writes them directly; for a GPU it writes pinned memory, and the used part
    is copied to the card in stream order.
    """

    def __init__(
        self, device: torch.device, rows: int, width: int, sizes: tuple[int, int, int, int]
    ) -> None:
        slots, changes, entries, masks = sizes
        words = -(-width // 32)
        shapes = ((rows,), (slots, SLOT), (changes, CHANGE), (entries, ENTRY), (masks, words))
        room = [-(-math.prod(shape) // _LINE) * _LINE for shape in shapes]
        self._begins = [0, *itertools.accumulate(room)]
        pinned = device.type == "cuda"
        self._host = torch.zeros(self._begins[-1], dtype=torch.int32, pin_memory=pinned)
        self._device = self._host.to(device) if pinned else self._host
        self._sent: Any = None
        parts = [
            (slice(begin, begin + math.prod(shape)), shape)
            for begin, shape in zip(self._begins, shapes, strict=False)
        ]
        self._arrays = [self._host.numpy()[at].reshape(shape) for at, shape in parts]
        self.owners, self.slots, self.changes, self.entries, self.masks = (
            self._device[at].view(shape) for at, shape in parts
        )
        self._arrays[0][:] = -1
        self._device.copy_(self._host)
        self.side = torch.empty(slots, width, dtype=torch.float32, device=device)
        self.rows = rows

    @classmethod
    def with_room(cls, device: torch.device, rows: int, width: int) -> PackedShapes:
        """For an engine's steps of up to ``rows`` outputs."""
        return cls(device, rows, width, (rows, CHANGES * rows, ENTRIES * rows, MASKS * rows))

    @classmethod
    def of(
        cls, buffers: SampleBuffers, rows: int, width: int, device: torch.device
    ) -> PackedShapes:
        """The shapes and masks of the first ``rows`` rows, in just enough memory."""
        changing = buffers.shaped(rows)
        found = [(*_changes(buffers, row), *_masks(buffers, row)) for row in changing]
        changes = [x for parts in found for x in parts if isinstance(x, Change)]
        entries = sum(change.count for change in changes)
        masks = sum(map(len, found)) - len(changes)
        sizes = len(changing), len(changes), entries, masks
        packed = cls(device, rows, width, sizes)
        left_out = packed.pack(buffers, rows)
        assert not left_out
        return packed

    def pack(self, buffers: SampleBuffers, rows: int) -> list[int]:
        """Pack the changes of the first ``rows`` rows of ``buffers``; other rows get none.

        Returns the rows for which there was no room, ascending: they are drawn unchanged.
        """
        buffers.mask_tasks.compute()
        if self._sent is not None:
            self._sent.synchronize()  # the previous contents have been copied
        owners, slots, changes, entries, masks = self._arrays
        owners[:] = -1
        left_out = []
        used = [0, 0, 0, 0]
        for row in buffers.shaped(rows):
            slot, change, entry, mask = used
            new, of_row = _changes(buffers, row), _masks(buffers, row)
            ends = entry + sum(each.count for each in new)
            wanted = [slot + 1, change + len(new), ends, mask + len(of_row)]
            if any(want > len(part) for want, part in zip(wanted, self._arrays[1:], strict=True)):
                left_out.append(row)
                continue
            owners[row] = slot
            numbers = [*range(mask, mask + len(of_row)), -1, -1][:2]
            slots[slot] = change, change + len(new), *numbers
            for words, target in zip(of_row, masks[mask:], strict=False):
                count = min(len(words), len(target))
                target[:count], target[count:] = words[:count].view(np.int32), 0
            for each, target in zip(new, changes[change:], strict=False):
                target[:3] = each.kind, entry, entry + each.count
                target[3:] = np.array(each.factors, np.float32).view(np.int32)
                entry = _write(each, entries, entry)
            used = wanted
        self._send(used)
        return left_out

    def _send(self, used: list[int]) -> None:
        """Copy the used part of entries and masks, and everything before them, to the device."""
        if self._device is self._host:
            return
        entries, masks = self._begins[3:5]
        for begin, end in (
            (0, entries + used[2] * ENTRY),
            (masks, masks + used[3] * self.masks.shape[1]),
        ):
            self._device[begin:end].copy_(self._host[begin:end], non_blocking=True)
        self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._sent.record()


def packed_bytes(rows: int, width: int) -> int:
    """Bytes that :meth:`PackedShapes.with_room` takes on the device."""
    words = -(-width // 32)
    return 4 * rows * (1 + SLOT + CHANGE * CHANGES + ENTRY * ENTRIES + MASKS * words + width)


def _changes(buffers: SampleBuffers, row: int) -> tuple[Change, ...]:
    shape = buffers.shapes[row]
    return () if shape is None else shape.changes


def _masks(buffers: SampleBuffers, row: int) -> list[Mask]:
    shape = buffers.shapes[row]
    both = (None if shape is None else shape.mask, buffers.mask(row))
    return [mask for mask in both if mask is not None]


def _write(change: Change, entries: NDArray[np.int32], begin: int) -> int:
    """Write a change's entries; returns their end."""
    end = begin + change.count
    entries[begin:end, 0] = change.ids[: change.count]
    if change.values is not None:
        entries[begin:end, 1] = change.values[: change.count].view(np.int32)
    return end
