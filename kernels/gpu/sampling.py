"""Samples one token per row of logits, without sorting and without waiting for the host.

The definition is :mod:`sdk.kernels.sampling`, the reference ``reference/sampling.py``. Weights are
float32 exponentials summed in float64, so tokens differ only if a draw or the mass of a truncation
is within 1e-7 of a boundary.

All truncations except one keep a prefix of the same order, by gap and then by id: one gap, and the
last id kept among tokens with that gap, describe the result. This cut is found by bisecting over
the bits of the gaps (non-negative floats are ordered like their bits), 3 bits per pass. One program
handles a row, so a row's token does not depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu.launch import expect_on_device
from sdk.kernels.packed_shapes import CHANGE, ENTRY, SLOT, PackedShapes
from sdk.kernels.sampling import FAR, ChangeKind, Draws, SampleBuffers

_FAR = tl.constexpr(FAR)
_LN2 = tl.constexpr(0.6931471805599453)
_ALL = tl.constexpr(2**31 - 1)
_INFINITE = tl.constexpr(float("inf"))
_SLOT, _CHANGE, _ENTRY = tl.constexpr(SLOT), tl.constexpr(CHANGE), tl.constexpr(ENTRY)
_ADD, _PENALIZE = tl.constexpr(int(ChangeKind.ADD)), tl.constexpr(int(ChangeKind.PENALIZE))
_FORCE = tl.constexpr(int(ChangeKind.FORCE))
#: Logits processed at a time, and the number that one program of the first kernel processes.
_BLOCK = 1024
_CHUNK = 8192


@triton.jit
def store_peak(x, index, width, peak_at, place_at):
    """The maximum of a chunk and where it first stands; a NaN goes before."""
    broken = x != x
    any_broken = tl.max(broken.to(tl.int32), axis=0) > 0
    peak = tl.max(tl.where(broken, float("-inf"), x), axis=0)
    wanted = tl.where(any_broken, broken, x == peak) & (index < width)
    tl.store(place_at, tl.min(tl.where(wanted, index, _ALL), axis=0))
    tl.store(peak_at, tl.where(any_broken, float("nan"), peak))


@triton.jit
def peaks_kernel(logits, peaks, places, width, stride, chunks, CHUNK: tl.constexpr):
    """Grid (rows, chunks): :func:`store_peak` of the logits."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + index, mask=index < width, other=float("-inf"))
    at = row * chunks + chunk
    store_peak(x, index, width, peaks + at, places + at)


@triton.jit
def shape_kernel(
    logits, owners, slots, changes, entries, masks, side, peaks, places,
    width, stride, chunks, words, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks): the rows that have a slot, changed, in ``side``; :func:`store_peak`.

    The tensors are those of ``PackedShapes``. A program changes its own chunk alone, so its threads
    wait for one another between two changes, and for no others.
    """
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


@triton.jit
def _gaps(row, index, width, best, temperature):
    x = tl.load(row + index, mask=index < width, other=float("-inf"))
    return tl.div_rn(best - x, temperature)


@triton.jit
def _weights(gap, kept):
    """Float64, of float32 exponentials."""
    return tl.where(kept & (gap <= _FAR), tl.exp(-gap), 0.0).to(tl.float64)


@triton.jit
def _kept(gap, index, most, last, mean, near, near_last, beyond, beyond_last):
    """The tokens up to ``(most, last)``, after ``(beyond, beyond_last)``, and near the mean."""
    apart = tl.abs(gap - mean)
    inside = (gap < most) | ((gap == most) & (index <= last))
    inside = inside & ((apart < near) | ((apart == near) & (index <= near_last)))
    return inside & ((gap > beyond) | ((gap == beyond) & (index > beyond_last)))


@triton.jit
def _sums(
    row, width, best, temperature, most, last, mean, near, near_last, likely, BLOCK: tl.constexpr
):
    """Over the kept tokens: weights, weights times gaps, and how many have ``likely`` or more."""
    total = tl.zeros((1,), tl.float64)
    moment = tl.zeros((1,), tl.float64)
    count = tl.zeros((1,), tl.int32)
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        gap = _gaps(row, index, width, best, temperature)
        kept = _kept(gap, index, most, last, mean, near, near_last, -1.0, 0) & (index < width)
        weight = _weights(gap, kept)
        total += tl.sum(weight, axis=0)
        moment += tl.sum(tl.where(weight > 0.0, weight * gap.to(tl.float64), 0.0), axis=0)
        count += tl.sum(((weight > 0.0) & (weight >= likely)).to(tl.int32), axis=0)
    return tl.sum(total, axis=0), tl.sum(moment, axis=0), tl.sum(count, axis=0)


@triton.jit
def _cut(
    row, width, best, temperature, most, last, mean, near, near_last, goal,
    APART: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first of the kept tokens whose weights reach ``goal`` (``COUNT``: each weighs 1).

    In the order of the gaps, or of the distances from the mean (``APART``), then of ids. Returns
    the largest of those and the last id that has it.
    """
    low = tl.full((), 0, tl.int32)
    before = goal * 0.0
    for step in range(11):
        shift = tl.maximum(28 - 3 * step, 0)
        bound = low + (tl.arange(0, 8) << shift)
        below = tl.zeros((8,), tl.float64)
        for start in range(0, width, BLOCK):
            index = start + tl.arange(0, BLOCK)
            gap = _gaps(row, index, width, best, temperature)
            kept = _kept(gap, index, most, last, mean, near, near_last, -1.0, 0) & (index < width)
            weight = kept.to(tl.float64) if COUNT else _weights(gap, kept)
            key = (tl.abs(gap - mean) if APART else gap).to(tl.int32, bitcast=True)
            below += tl.sum(tl.where(key[:, None] < bound[None, :], weight[:, None], 0.0), axis=0)
        short = below < goal
        low += (tl.sum(short.to(tl.int32), axis=0) - 1) << shift
        low = tl.minimum(low, 0x7F800000)  # infinity: all of them together weigh less
        before = tl.max(tl.where(short, below, 0.0), axis=0)
    final = -1
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        gap = _gaps(row, index, width, best, temperature)
        kept = _kept(gap, index, most, last, mean, near, near_last, -1.0, 0) & (index < width)
        key = (tl.abs(gap - mean) if APART else gap).to(tl.int32, bitcast=True)
        kept = kept & (key == low)
        weight = kept.to(tl.float64) if COUNT else _weights(gap, kept)
        ahead = before + tl.cumsum(weight, axis=0) - weight
        final = tl.maximum(final, tl.max(tl.where(kept & (ahead < goal), index, -1), axis=0))
        before += tl.sum(weight, axis=0)
    return low.to(tl.float32, bitcast=True), final


@triton.jit
def _draw(
    row, width, best, temperature, most, last, mean, near, near_last, beyond, beyond_last, uniform,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token with which the running sum of weights exceeds its goal, and its share."""
    total = tl.zeros((1,), tl.float64)
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        gap = _gaps(row, index, width, best, temperature)
        kept = _kept(gap, index, most, last, mean, near, near_last, beyond, beyond_last)
        total += tl.sum(_weights(gap, kept & (index < width)), axis=0)
    total = tl.sum(total, axis=0)
    goal = uniform * total
    token = _ALL
    final = 0  # should rounding leave no sum above the goal
    running = total * 0.0
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        gap = _gaps(row, index, width, best, temperature)
        kept = _kept(gap, index, most, last, mean, near, near_last, beyond, beyond_last)
        weight = _weights(gap, kept & (index < width))
        reached = (weight > 0.0) & (running + tl.cumsum(weight, axis=0) > goal)
        token = tl.minimum(token, tl.min(tl.where(reached, index, _ALL), axis=0))
        final = tl.maximum(final, tl.max(tl.where(weight > 0.0, index, 0), axis=0))
        running += tl.sum(weight, axis=0)
    token = tl.where(token == _ALL, final, token)
    gap = tl.div_rn(best - tl.load(row + token), temperature)
    return token, tl.exp(-gap).to(tl.float64) / total


@triton.jit
def _best(peaks, places, chunks, CHUNKS: tl.constexpr):
    """The maximum of a row and its first token, of those of its chunks; a NaN goes before."""
    chunk = tl.arange(0, CHUNKS)
    peak = tl.load(peaks + chunk, mask=chunk < chunks, other=float("-inf"))
    place = tl.load(places + chunk, mask=chunk < chunks, other=_ALL)
    broken = peak != peak
    any_broken = tl.max(broken.to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(broken, float("-inf"), peak), axis=0)
    wanted = tl.where(any_broken, broken, peak == best)
    token = tl.min(tl.where(wanted, place, _ALL), axis=0)
    return tl.where(any_broken, float("nan"), best), token


@triton.jit
def sample_kernel(
    logits, peaks, places, draws, out, width, stride, chunks,
    owners, side, side_peaks, side_places,
    DRAWN: tl.constexpr, SHAPED: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows): ``out`` float64 ``[R, 3]``: token, maximum, probability.

    ``draws`` float64 ``[R, 8]``, the bytes of ``DRAW``. ``SHAPED``: a row with a slot, in
    ``owners``, is that of ``side``, if its own maximum is finite.
    """
    number = tl.program_id(0).to(tl.int64)
    best, token = _best(peaks + number * chunks, places + number * chunks, chunks, CHUNKS)
    share = tl.full((), 1.0, tl.float64)
    row = logits + number * stride
    if SHAPED:
        slot = tl.load(owners + number).to(tl.int64)
        changed = (slot >= 0) & (tl.abs(best) < _INFINITE)
        # As numbers: Triton 3.6 fails to compile a choice between pointers for AMD's cards.
        other = (side + slot * width).to(tl.int64)
        row = tl.where(changed, other, row.to(tl.int64)).to(tl.pointer_type(tl.float32))
        if changed:
            at = slot * chunks
            best, token = _best(side_peaks + at, side_places + at, chunks, CHUNKS)
            share = tl.where(tl.abs(best) < _INFINITE, share, 0.0)
    if DRAWN:
        heat = tl.load(draws + number * 8)
        if (heat > 0.0) & (tl.abs(best) < _INFINITE):
            temperature = tl.maximum(heat, 1e-30).to(tl.float32)
            token, share = _drawn(row, width, best, temperature, draws + number * 8, BLOCK)
    tl.store(out + number * 3, token.to(tl.float64))
    tl.store(out + number * 3 + 1, best.to(tl.float64))
    tl.store(out + number * 3 + 2, share)


@triton.jit
def _not_above(limit):
    """The largest float32 that is not above ``limit`` (float64), or 0."""
    most = limit.to(tl.float32)
    bits = most.to(tl.int32, bitcast=True)
    above = (most.to(tl.float64) > limit) & (most > 0.0)
    return tl.maximum(tl.where(above, bits - 1, bits).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def _all_but_one(
    row, width, best, heat, most, last, mean, near, near_last, threshold, BLOCK: tl.constexpr
):
    """Where the last begins of the kept tokens that have ``threshold`` of the weight (XTC)."""
    beyond, beyond_last = tl.full((), -1.0, tl.float32), tl.full((), _ALL, tl.int32)
    total, _, _ = _sums(row, width, best, heat, most, last, mean, near, near_last, 0.0, BLOCK)
    goal = threshold * total
    _, _, likely = _sums(row, width, best, heat, most, last, mean, near, near_last, goal, BLOCK)
    if likely >= 2:
        goal = (likely - 1).to(tl.float64)
        beyond, beyond_last = _cut(
            row, width, best, heat, most, last, mean, near, near_last, goal, False, True, BLOCK
        )
    return beyond, beyond_last


@triton.jit
def _drawn(row, width, best, heat, draw, BLOCK: tl.constexpr):
    """Truncate and draw one row, whose maximum is finite: ``reference/sampling.py``."""
    most = tl.full((), _INFINITE, tl.float32)
    last = tl.full((), _ALL, tl.int32)
    mean = tl.full((), 0.0, tl.float32)
    near, near_last = most, last
    beyond, beyond_last = mean - 1.0, last
    surprise = tl.load(draw + 5)
    if surprise == surprise:
        total, _, _ = _sums(row, width, best, heat, most, last, mean, near, near_last, 0.0, BLOCK)
        most = _not_above(surprise * _LN2 - tl.log(total))
    else:
        min_p = tl.load(draw + 1)
        if min_p > 0.0:
            most = (-tl.log(min_p)).to(tl.float32)
        top_k = tl.load(draw + 6).to(tl.int64, bitcast=True)
        if (top_k > 0) & (top_k < width):
            goal = top_k.to(tl.float64)
            cut, cut_last = _cut(
                row, width, best, heat, most, last, mean, near, near_last, goal, False, True, BLOCK
            )
            last = tl.where(cut < most, cut_last, last)
            last = tl.where(cut == most, tl.minimum(cut_last, last), last)
            most = tl.minimum(cut, most)
        typical_p = tl.load(draw + 2)
        if typical_p < 1.0:
            total, moment, _ = _sums(
                row, width, best, heat, most, last, mean, near, near_last, 0.0, BLOCK
            )
            mean = (moment / total).to(tl.float32)
            goal = tl.maximum(typical_p * total, 1e-300)
            near, near_last = _cut(
                row, width, best, heat, most, last, mean, near, near_last, goal, True, False, BLOCK
            )
        top_p = tl.load(draw + 3)
        if top_p < 1.0:
            total, _, _ = _sums(
                row, width, best, heat, most, last, mean, near, near_last, 0.0, BLOCK
            )
            goal = tl.maximum(top_p * total, 1e-300)
            most, last = _cut(
                row, width, best, heat, most, last, mean, near, near_last, goal, False, False, BLOCK
            )
        threshold = tl.load(draw + 4)
        if threshold >= 0.0:
            beyond, beyond_last = _all_but_one(
                row, width, best, heat, most, last, mean, near, near_last, threshold, BLOCK
            )
    return _draw(
        row, width, best, heat, most, last, mean, near, near_last, beyond, beyond_last,
        tl.load(draw + 7), BLOCK,
    )  # fmt: skip


class Sample:
    """See :meth:`sdk.kernels.ops.Ops.sample`."""

    name = "gpu.sample"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, logits: Tensor, draws: Draws | None, out: SampleBuffers) -> None:
        """Sample ``logits [R, V]`` float32, R and V at least 1; without ``draws`` the argmax.

        Needs one copy to the device and one back.
        """
        rows = logits.shape[0]
        numbers = None
        if draws is not None and (draws["temperature"][:rows] > 0).any():
            raw = torch.from_numpy(draws[:rows].view("f8").reshape(rows, 8))
            numbers = raw.to(logits.device, non_blocking=True)
        shapes = None
        if out.shaped(rows):
            shapes = PackedShapes.of(out, rows, logits.shape[1], logits.device)
        out.write(self.rows(logits, numbers, shapes).cpu().numpy())

    def rows(
        self, logits: Tensor, draws: Tensor | None, shapes: PackedShapes | None = None
    ) -> Tensor:
        """See :meth:`sdk.kernels.ops.Ops.sample_rows`; without ``draws`` the argmax."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        side = None if shapes is None else shapes.side
        expect_on_device("sample", logits, draws, side)
        rows, width = logits.shape
        chunks = triton.cdiv(width, _CHUNK)
        peaks = logits.new_empty(rows, chunks)
        places = logits.new_empty(rows, chunks, dtype=torch.int32)
        out = logits.new_empty(rows, 3, dtype=torch.float64)
        stride = logits.stride(0)
        peaks_kernel[(rows, chunks)](
            logits, peaks, places, width, stride, chunks, CHUNK=_CHUNK, num_warps=8
        )
        changed: tuple[Tensor | None, ...] = (None,) * 4
        if shapes is not None:
            changed = (shapes.owners, side, *_shape(logits, shapes))
        sample_kernel[(rows,)](
            logits, peaks, places, out if draws is None else draws, out, width, stride, chunks,
            *changed, DRAWN=draws is not None, SHAPED=shapes is not None,
            CHUNKS=triton.next_power_of_2(chunks), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        return out


def _shape(logits: Tensor, shapes: PackedShapes) -> tuple[Tensor, Tensor]:
    """Write changed rows to ``shapes.side``; returns the maxima of their chunks, and the places."""
    slots, width = shapes.side.shape
    chunks = triton.cdiv(width, _CHUNK)
    peaks = logits.new_empty(slots, chunks)
    places = logits.new_empty(slots, chunks, dtype=torch.int32)
    shape_kernel[(len(logits), chunks)](
        logits, shapes.owners, shapes.slots, shapes.changes, shapes.entries, shapes.masks,
        shapes.side, peaks, places, width, logits.stride(0), chunks, shapes.masks.shape[1],
        CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return peaks, places


OPS: dict[str, tuple[Any, ...]] = {"sample": (Sample(),)}
