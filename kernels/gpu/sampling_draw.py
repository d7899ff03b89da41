"""One token of a row: the truncations of ``reference/sampling.py``, then the draw.

All truncations except one keep a prefix of the same order, by gap and then by id: one gap, and the
last id kept among tokens with that gap, describe the result. This cut is found without sorting, by
bisecting over the bits of the gaps.

Functions take two tuples. ``view``: the row, its candidates' ids, their number, whether they are
listed (else all tokens are candidates), the maximum, the temperature, and number and weight of the
tokens before the candidates, which are kept for sure. ``kept``: what the truncations left, the
tokens up to ``(most, last)`` with distances from ``mean`` up to ``(near, near_last)`` that come
after ``(beyond, beyond_last)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.sampling_candidates import BOUNDS, SUMS, min_p_gap, mirostat_gap, sums_of
from sdk.kernels.gpu.sampling_rows import (
    DRAW_VALUES,
    MIROSTAT_MU,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    UNIFORM,
    XTC_THRESHOLD,
    bits_of,
    gaps_of,
    row_of,
    temperature_of,
    weights_of,
)

_ALL = tl.constexpr(2**31 - 1)
_INFINITE, _INFINITE_BITS = tl.constexpr(float("inf")), tl.constexpr(0x7F800000)
#: Bits of a gap that one pass finds, and the values that they have.
_DIGIT, _DIGITS = tl.constexpr(3), tl.constexpr(8)


@triton.jit
def _read(view, start, BLOCK: tl.constexpr):
    """Ids and gaps of ``BLOCK`` candidates, and which of them exist."""
    row, ids, count, listed, best, temperature, _, _ = view
    place = start + tl.arange(0, BLOCK)
    inside = place < count
    index = tl.load(ids + place, mask=inside & listed, other=0)
    index = tl.where(listed, index, place)
    return index, gaps_of(row, index, inside, best, temperature), inside


@triton.jit
def _kept(gap, index, inside, kept):
    most, last = kept[0]
    mean, near, near_last = kept[1]
    beyond, beyond_last = kept[2]
    apart = tl.abs(gap - mean)
    inside = inside & ((gap < most) | ((gap == most) & (index <= last)))
    inside = inside & ((apart < near) | ((apart == near) & (index <= near_last)))
    return inside & ((gap > beyond) | ((gap == beyond) & (index > beyond_last)))


@triton.jit
def _sums(view, kept, BLOCK: tl.constexpr):
    """Over the kept tokens: weights; over the candidates among them: weights times gaps."""
    total = tl.zeros((BLOCK,), tl.float64)
    moment = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, view[2], BLOCK):
        index, gap, inside = _read(view, start, BLOCK)
        weight = weights_of(gap, _kept(gap, index, inside, kept))
        total += weight
        moment += tl.where(weight > 0.0, weight * gap.to(tl.float64), 0.0)
    return view[7] + tl.sum(total, axis=0), tl.sum(moment, axis=0)


@triton.jit
def _likely(view, kept, least, BLOCK: tl.constexpr):
    """How many of the kept tokens have a weight, and one of ``least`` or more."""
    number = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, view[2], BLOCK):
        index, gap, inside = _read(view, start, BLOCK)
        weight = weights_of(gap, _kept(gap, index, inside, kept))
        number += ((weight > 0.0) & (weight >= least)).to(tl.int32)
    return tl.sum(number, axis=0)


@triton.jit
def _cut(view, kept, between, goal, APART: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The first of the kept tokens whose weights reach ``goal`` (``COUNT``: each weighs 1).

    In the order of the gaps, or of the distances from the mean (``APART``), then of ids. Returns
    the largest of those and the last id that has it. ``between``: the bits of the least one that
    it can be and of the largest; if less than ``goal`` is up to there, all of that is kept.
    """
    low, high = between
    base = view[6].to(tl.float64) if COUNT else view[7]
    before = base
    left = (bits_of((high - low + 1).to(tl.float32)) >> 23) - 126  # bits of the number of values
    for step in range((left + _DIGIT - 1) // _DIGIT):
        shift = tl.maximum(left - _DIGIT * (step + 1), 0)
        bound = low + tl.minimum(tl.arange(0, _DIGITS) << shift, _INFINITE_BITS - low)
        below = tl.zeros((BLOCK, _DIGITS), tl.float64)
        for start in range(0, view[2], BLOCK):
            index, gap, inside = _read(view, start, BLOCK)
            inside = _kept(gap, index, inside, kept)
            weight = inside.to(tl.float64) if COUNT else weights_of(gap, inside)
            key = bits_of(tl.abs(gap - kept[1][0]) if APART else gap)
            below += tl.where(key[:, None] < bound[None, :], weight[:, None], 0.0)
        mass = base + tl.sum(below, axis=0)
        short = mass < goal
        # the first of the bounds is short, unless the sums before are rounded to reach the goal
        digit = tl.maximum(tl.sum(short.to(tl.int32), axis=0) - 1, 0)
        low += tl.minimum(digit << shift, _INFINITE_BITS - low)
        before = tl.max(tl.where(short, mass, 0.0), axis=0)
    final = -1
    for start in range(0, view[2], BLOCK):
        index, gap, inside = _read(view, start, BLOCK)
        key = bits_of(tl.abs(gap - kept[1][0]) if APART else gap)
        inside = _kept(gap, index, inside, kept) & (key == low)
        weight = inside.to(tl.float64) if COUNT else weights_of(gap, inside)
        ahead = before + tl.cumsum(weight, axis=0) - weight
        final = tl.maximum(final, tl.max(tl.where(inside & (ahead < goal), index, -1), axis=0))
        before += tl.sum(weight, axis=0)
    return low.to(tl.float32, bitcast=True), final


@triton.jit
def _keep_count(view, kept, between, count, BLOCK: tl.constexpr):
    """The ``count`` likeliest."""
    most, last = kept[0]
    cut, cut_last = _cut(view, kept, between, count.to(tl.float64), False, True, BLOCK)
    last = tl.where(cut < most, cut_last, last)
    last = tl.where(cut == most, tl.minimum(cut_last, last), last)
    return (tl.minimum(cut, most), last), kept[1], kept[2]


@triton.jit
def _keep_mass(view, kept, between, mass, BLOCK: tl.constexpr):
    """The likeliest whose weights reach ``mass``, one at least."""
    cut = _cut(view, kept, between, tl.maximum(mass, 1e-300), False, False, BLOCK)
    return cut, kept[1], kept[2]


@triton.jit
def _keep_typical(view, kept, between, mean, mass, BLOCK: tl.constexpr):
    """Those with gaps nearest to ``mean`` whose weights reach ``mass``, one at least."""
    _, near, near_last = kept[1]
    kept = (kept[0], (mean, near, near_last), kept[2])
    near, near_last = _cut(view, kept, between, tl.maximum(mass, 1e-300), True, False, BLOCK)
    return kept[0], (mean, near, near_last), kept[2]


@triton.jit
def _exclude(view, kept, between, count, BLOCK: tl.constexpr):
    """All but the ``count`` likeliest (XTC)."""
    return kept[0], kept[1], _cut(view, kept, between, count.to(tl.float64), False, True, BLOCK)


@triton.jit
def _draw(view, kept, begin, running, goal, BLOCK: tl.constexpr):
    """The first of the candidates from ``begin`` on with which the sum of weights exceeds ``goal``,
    and its gap; ``running``: the sum before ``begin``."""
    token = _ALL
    final = 0  # should rounding leave no sum above the goal
    for start in range(begin, view[2], BLOCK):
        index, gap, inside = _read(view, start, BLOCK)
        weight = weights_of(gap, _kept(gap, index, inside, kept))
        reached = (weight > 0.0) & (running + tl.cumsum(weight, axis=0) > goal)
        token = tl.minimum(token, tl.min(tl.where(reached, index, _ALL), axis=0))
        final = tl.maximum(final, tl.max(tl.where(weight > 0.0, index, 0), axis=0))
        running += tl.sum(weight, axis=0)
    token = tl.where(token == _ALL, final, token)
    return token, gaps_of(view[0], token, token >= 0, view[4], view[5])


@triton.jit
def sample_kernel(
    logits, peaks, places, draws, owners, side, side_peaks, side_places, sums, bounds, ids, out,
    width, stride, chunks,
    DRAWN: tl.constexpr, SHAPED: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows): ``out`` float64 ``[R, 3]``: token, maximum, probability.

    ``draws`` float64 ``[R, 8]``, the bytes of ``DRAW``.
    """
    after_earlier()
    number = tl.program_id(0).to(tl.int64)
    row, best, token, share = row_of(
        number, logits, peaks, places, width, stride, chunks,
        owners, side, side_peaks, side_places, SHAPED, CHUNKS,
    )  # fmt: skip
    if DRAWN:
        draw = draws + number * DRAW_VALUES
        if (tl.load(draw + TEMPERATURE) > 0.0) & (tl.abs(best) < _INFINITE):
            bounds += BOUNDS * number
            count, sure = tl.load(bounds), tl.load(bounds + 1)
            between = (tl.load(bounds + 4), tl.load(bounds + 5))
            listed = count >= 0
            count = tl.where(listed, count, width)
            at = sums + SUMS * number * chunks
            weight = tl.full((), 0.0, tl.float64)
            if sure > 0:
                weight = tl.sum(sums_of(at, 2, chunks, CHUNKS), axis=0)
            temperature = temperature_of(draw)
            view = (row, ids + number * ROOM, count, listed, best, temperature, sure, weight)
            token, share = _drawn(view, between, draw, at, chunks, width, CHUNKS, CHUNK, BLOCK)
    tl.store(out + number * 3, token.to(tl.float64))
    tl.store(out + number * 3 + 1, best.to(tl.float64))
    tl.store(out + number * 3 + 2, share)


@triton.jit
def _drawn(
    view, between, draw, sums, chunks, width,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Truncate and draw one row, whose maximum is finite: the token and its probability.

    ``between``: bits of gaps, which bound the first cut.
    """
    total = tl.sum(sums_of(sums, 0, chunks, CHUNKS), axis=0)
    none, whole = tl.full((), 0.0, tl.float32), tl.full((), _INFINITE, tl.float32)
    all_ids = tl.full((), _ALL, tl.int32)
    kept = ((min_p_gap(draw), all_ids), (none, whole, all_ids), (none - 1.0, all_ids))
    zero = tl.full((), 0, tl.int32)
    anywhere = (zero, zero + _INFINITE_BITS)
    surprise = tl.load(draw + MIROSTAT_MU)
    if surprise == surprise:
        kept = ((mirostat_gap(surprise, total), all_ids), kept[1], kept[2])
        total, _ = _sums(view, kept, BLOCK)
    else:
        top_k = tl.load(draw + TOP_K).to(tl.int64, bitcast=True)
        typical_p = tl.load(draw + TYPICAL_P)
        moment = total
        if (top_k > 0) & (top_k < width):
            kept = _keep_count(view, kept, between, top_k, BLOCK)
            between = anywhere
            total, moment = _sums(view, kept, BLOCK)
        elif typical_p < 1.0:
            moment = tl.sum(sums_of(sums, 1, chunks, CHUNKS), axis=0)
        if typical_p < 1.0:
            mean = (moment / total).to(tl.float32)
            kept = _keep_typical(view, kept, anywhere, mean, typical_p * total, BLOCK)
            between = anywhere
            total, _ = _sums(view, kept, BLOCK)
        top_p = tl.load(draw + TOP_P)
        if top_p < 1.0:
            kept = _keep_mass(view, kept, between, top_p * total, BLOCK)
            total, _ = _sums(view, kept, BLOCK)
        threshold = tl.load(draw + XTC_THRESHOLD)
        if threshold >= 0.0:
            likely = _likely(view, kept, threshold * total, BLOCK)
            if likely >= 2:
                kept = _exclude(view, kept, anywhere, likely - 1, BLOCK)
                total, _ = _sums(view, kept, BLOCK)
    goal = tl.load(draw + UNIFORM) * total
    begin, end, running = 0, view[2], total * 0.0
    listed = view[3]
    if view[6] > 0:  # the token need not be a candidate
        begin, running = _chunk_of(view, kept, sums, goal, chunks, CHUNKS, CHUNK, BLOCK)
        end, listed = tl.minimum(begin + CHUNK, width), False
    row, ids, _, _, best, temperature, sure, weight = view
    view = (row, ids, end, listed, best, temperature, sure, weight)
    token, gap = _draw(view, kept, begin, running, goal, BLOCK)
    return token, tl.exp(-gap).to(tl.float64) / total


@triton.jit
def _chunk_of(
    view, kept, sums, goal, chunks, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Where the first chunk begins with which the kept weights exceed ``goal``, else the last with
    a weight; and the sum before it."""
    chunk = tl.arange(0, CHUNKS)
    weight = sums_of(sums, 2, chunks, CHUNKS)
    part: tl.constexpr = BLOCK // 4  # of [part, CHUNKS] numbers
    for start in range(0, view[2], part):
        index, gap, inside = _read(view, start, part)
        own = weights_of(gap, _kept(gap, index, inside, kept))
        weight += tl.sum(
            tl.where((index // CHUNK)[:, None] == chunk[None, :], own[:, None], 0.0), axis=0
        )
    upto = tl.cumsum(weight, axis=0)
    chosen = tl.min(tl.where((upto > goal) & (weight > 0.0), chunk, _ALL), axis=0)
    chosen = tl.where(chosen == _ALL, tl.max(tl.where(weight > 0.0, chunk, 0), axis=0), chosen)
    return chosen * CHUNK, tl.sum(tl.where(chunk == chosen, upto - weight, 0.0), axis=0)
