"""Changes to logits before the draw: :class:`sdk.kernels.operators.sampling.Shape`, packed."""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.sampling_rows import store_peak
from sdk.kernels.operators.sampling import ChangeKind
from sdk.kernels.packed_shapes import CHANGE, ENTRY, SLOT

_SLOT, _CHANGE, _ENTRY = tl.constexpr(SLOT), tl.constexpr(CHANGE), tl.constexpr(ENTRY)
_ADD, _PENALIZE = tl.constexpr(int(ChangeKind.ADD)), tl.constexpr(int(ChangeKind.PENALIZE))
_FORCE = tl.constexpr(int(ChangeKind.FORCE))


@triton.jit
def shape_kernel(
    logits, owners, slots, changes, entries, masks, side, peaks, places,
    width, stride, chunks, words, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks): the rows that have a slot, changed, in ``side``; :func:`store_peak`.

    The tensors are those of ``PackedShapes``. A program changes its own chunk alone, so its threads
    wait for one another between two changes, and for no others.
    """
    after_earlier()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(owners + row).to(tl.int64)
    if slot >= 0:
        begin = chunk * CHUNK
        index = begin + tl.arange(0, CHUNK)
        inside = index < width
        x = tl.load(logits + row * stride + index, mask=inside, other=float("-inf"))
        for number in tl.static_range(2, 4):
            mask = tl.load(slots + slot * _SLOT + number).to(tl.int64)
            if mask >= 0:
                bits = tl.load(masks + mask * words + index // 32, mask=inside, other=0)
                x = tl.where(((bits >> (index % 32)) & 1) != 0, x, float("-inf"))
        own = side + slot * width
        tl.store(own + index, x, mask=inside)
        end = tl.minimum(begin + CHUNK, width)
        first, last = tl.load(slots + slot * _SLOT), tl.load(slots + slot * _SLOT + 1)
        for number in range(first, last):
            change = changes + number * _CHANGE
            if tl.load(change) == _FORCE:
                tl.debug_barrier()
                tl.store(own + index, tl.full((CHUNK,), float("-inf"), tl.float32), mask=inside)
            tl.debug_barrier()
            _apply(own, change, entries, begin, end, BLOCK)
        tl.debug_barrier()
        x = tl.load(own + index, mask=inside, other=float("-inf"))
        at = slot * chunks + chunk
        store_peak(x, index, width, peaks + at, places + at)


@triton.jit
def _apply(own, change, entries, begin, end, BLOCK: tl.constexpr):
    """The entries of a change whose ids are ``begin`` or more and below ``end``."""
    kind = tl.load(change)
    first, last = tl.load(change + 1), tl.load(change + 2)
    repetition = tl.load(change + 3).to(tl.float32, bitcast=True)
    frequency = tl.load(change + 4).to(tl.float32, bitcast=True)
    presence = tl.load(change + 5).to(tl.float32, bitcast=True)
    if kind == _FORCE:
        last = tl.minimum(last, first + 1)
    for start in range(first, last, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        token = tl.load(entries + entry * _ENTRY, mask=entry < last, other=-1)
        number = tl.load(entries + entry * _ENTRY + 1, mask=entry < last, other=0)
        number = number.to(tl.float32, bitcast=True)
        inside = (token >= begin) & (token < end)
        value = tl.load(own + token, mask=inside, other=0.0)
        costly = tl.where(value > 0.0, tl.div_rn(value, repetition), value * repetition)
        costly -= frequency * number
        costly -= tl.where(number > 0.0, presence, 0.0)
        fixed = tl.where(kind == _FORCE, 0.0, float("-inf"))
        changed = tl.where(kind == _ADD, value + number, fixed)
        tl.store(own + token, tl.where(kind == _PENALIZE, costly, changed), mask=inside)
