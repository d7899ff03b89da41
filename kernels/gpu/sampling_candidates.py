"""Which tokens of a row its truncations may keep, found by all programs of the row together.

A histogram of the gaps bounds what is kept: no token after one bin, and if there is only one
truncation, every token before another (:func:`_bounds`). The tokens between are the row's
candidates: their ids are listed in ascending order for the program that chooses, at places that
follow from the counts of the chunks before. Of the tokens that are kept for sure it needs the sums
of each chunk. A row with more candidates than there is room for is read by that program as a whole.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.sampling_rows import (
    DRAW_VALUES,
    MIN_P,
    MIROSTAT_MU,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    XTC_THRESHOLD,
    bits_of,
    gaps_of,
    row_of,
    temperature_of,
    weights_of,
)
from sdk.kernels.operators.sampling import FAR

_FAR = tl.constexpr(FAR)
_INFINITE = tl.constexpr(float("inf"))
_LN2 = tl.constexpr(0.6931471805599453)
#: Bins of gaps have 1/64 of the power of two below ``gap + 8``: they are 1/8 wide up to a gap of 8,
#: 1/4 up to 24, 1/2 up to 56, then 1; 256 of them reach 120.
_SHIFT, _EIGHT = tl.constexpr(17), tl.constexpr(0x41000000)
#: Bounds are sums of up to 256 values; exponentials err by 2e-7, the ends of bins by 5e-7.
_MORE = tl.constexpr(1.0 + 1e-5)
#: Values of a chunk in ``sums``: weights of the tokens that ``min_p`` keeps, the same times gaps,
#: weights of those that all truncations keep for sure.
SUMS = tl.constexpr(3)
#: Values of a row in ``bounds``: see :func:`bounds_kernel`.
BOUNDS = tl.constexpr(6)


@triton.jit
def _origin(temperature):
    """8, divided by the power of two in a temperature above 1: so much smaller are all gaps."""
    halvings = tl.maximum((bits_of(temperature) >> 23) - 127, 0)
    return (tl.full((), _EIGHT, tl.int32) - (halvings << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _bin_of(gap, origin, BINS: tl.constexpr):
    """Bins ascend with gaps; the last one holds all beyond."""
    return tl.minimum((bits_of(gap + origin) >> _SHIFT) - (bits_of(origin) >> _SHIFT), BINS - 1)


@triton.jit
def _begin_of(bins, origin):
    """The least gap of a bin."""
    return (bits_of(origin) + (bins << _SHIFT)).to(tl.float32, bitcast=True) - origin


@triton.jit
def min_p_gap(draw):
    """The largest gap that ``min_p`` keeps; mirostat ignores it."""
    min_p, surprise = tl.load(draw + MIN_P), tl.load(draw + MIROSTAT_MU)
    most = tl.full((), _INFINITE, tl.float32)
    if (min_p > 0.0) & (surprise != surprise):
        most = (-tl.log(min_p)).to(tl.float32)
    return most


@triton.jit
def mirostat_gap(surprise, total):
    """The largest gap of ``surprise`` bits or less if the weights sum to ``total``, or 0."""
    limit = surprise * _LN2 - tl.log(total)
    most = limit.to(tl.float32)
    bits = bits_of(most)
    above = (most.to(tl.float64) > limit) & (most > 0.0)
    return tl.maximum(tl.where(above, bits - 1, bits).to(tl.float32, bitcast=True), 0.0)


@triton.jit
def sums_of(sums, which, chunks, CHUNKS: tl.constexpr):
    """One of a row's ``sums``, of each chunk."""
    chunk = tl.arange(0, CHUNKS)
    return tl.load(sums + SUMS * chunk + which, mask=chunk < chunks, other=0.0)


@triton.jit
def _searched(draw, width):
    """Whether there is a truncation but ``min_p``."""
    top_k = tl.load(draw + TOP_K).to(tl.int64, bitcast=True)
    surprise = tl.load(draw + MIROSTAT_MU)
    found = (tl.load(draw + TYPICAL_P) < 1.0) | (tl.load(draw + TOP_P) < 1.0)
    found = found | (tl.load(draw + XTC_THRESHOLD) >= 0.0) | (surprise == surprise)
    return found | ((top_k > 0) & (top_k < width))


@triton.jit
def count_kernel(
    logits, peaks, places, draws, owners, side, side_peaks, side_places, counts, sums,
    width, stride, chunks,
    SHAPED: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks): ``counts`` int32 ``[R, chunks, BINS]``, the tokens in each bin, if a
    truncation has to search; and the first of ``sums`` float64 ``[R, chunks, 3]``, for rows with
    ``typical_p`` the second too."""
    after_earlier()
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw = draws + number * DRAW_VALUES
    if tl.load(draw + TEMPERATURE) > 0.0:
        row, best, _, _ = row_of(
            number, logits, peaks, places, width, stride, chunks,
            owners, side, side_peaks, side_places, SHAPED, CHUNKS,
        )  # fmt: skip
        if tl.abs(best) < _INFINITE:
            temperature = temperature_of(draw)
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            inside = index < width
            gap = gaps_of(row, index, inside, best, temperature)
            at = number * chunks + chunk
            if _searched(draw, width):
                bins = _bin_of(gap, _origin(temperature), BINS)
                found = tl.histogram(bins, BINS, mask=inside)
                tl.store(counts + at * BINS + tl.arange(0, BINS), found)
            weight = weights_of(gap, inside & (gap <= min_p_gap(draw)))
            tl.store(sums + SUMS * at, tl.sum(weight, axis=0))
            if tl.load(draw + TYPICAL_P) < 1.0:
                moment = tl.where(weight > 0.0, weight * gap.to(tl.float64), 0.0)
                tl.store(sums + SUMS * at + 1, tl.sum(moment, axis=0))


@triton.jit
def bounds_kernel(
    logits, peaks, places, draws, owners, side, side_peaks, side_places, counts, sums,
    bounds, begins, width, stride, chunks,
    SHAPED: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Grid (rows): ``bounds`` int32 ``[R, 6]`` and ``begins`` int32 ``[R, chunks]``.

    Bounds are the number of candidates; the number of other tokens that are certainly kept; the
    bits of two differences from the maximum, the largest among the certain tokens (-1 without any)
    and the largest among the candidates; and the bits of two gaps, between which the first cut of
    ``top_k`` or ``top_p`` lies. If the candidates do not fit, their number is -1, and no token
    counts as certain.
    ``begins``: how many candidates are in the chunks before each chunk.
    """
    after_earlier()
    number = tl.program_id(0).to(tl.int64)
    draw = draws + number * DRAW_VALUES
    if tl.load(draw + TEMPERATURE) > 0.0:
        _, best, _, _ = row_of(
            number, logits, peaks, places, width, stride, chunks,
            owners, side, side_peaks, side_places, SHAPED, CHUNKS,
        )  # fmt: skip
        if tl.abs(best) < _INFINITE:
            temperature = temperature_of(draw)
            origin = _origin(temperature)
            bins = BINS - 1 - tl.arange(0, BINS)  # from the last to the first
            chunk = tl.arange(0, CHUNKS)
            at = counts + (number * chunks + chunk)[:, None] * BINS + bins[None, :]
            searched = _searched(draw, width)
            counted = tl.where(searched, chunks, 0)
            table = tl.load(at, mask=(chunk < counted)[:, None], other=0)
            of_bins = tl.sum(table, axis=0)
            total = tl.sum(sums_of(sums + SUMS * number * chunks, 0, chunks, CHUNKS), axis=0)
            cut, last, several = _bounds(draw, bins, of_bins, total, origin, width, BINS)
            up_to_last = tl.sum(tl.where(bins <= last, of_bins, 0), axis=0)
            few = searched & (up_to_last <= ROOM // 8)  # soon read, also what is sure
            sure = tl.where(few | several, 0, cut)
            wanted = ((bins >= sure) & (bins <= last))[None, :]
            candidates = tl.sum(tl.where(wanted, table, 0), axis=1)
            begin = tl.cumsum(candidates, axis=0) - candidates
            tl.store(begins + number * chunks + chunk, begin, mask=chunk < chunks)
            listed = tl.sum(candidates, axis=0)
            certain = tl.sum(tl.where(bins < sure, of_bins, 0), axis=0)
            certain = tl.where(searched, certain, width)
            fits = listed <= ROOM
            bounds += BOUNDS * number
            tl.store(bounds, tl.where(fits, listed, -1))
            tl.store(bounds + 1, tl.where(fits, certain, 0))
            near = _farthest(cut - 1, temperature, origin, BINS)
            far = _farthest(last, temperature, origin, BINS)
            tl.store(bounds + 2, tl.where(sure > 0, near, -1))
            tl.store(bounds + 3, far)
            least = bits_of(tl.div_rn(near.to(tl.float32, bitcast=True), temperature)) + 1
            tl.store(bounds + 4, tl.where(cut > 0, least, 0))
            tl.store(bounds + 5, bits_of(tl.div_rn(far.to(tl.float32, bitcast=True), temperature)))


@triton.jit
def _farthest(bin, temperature, origin, BINS: tl.constexpr):
    """The bits of the largest difference from the maximum in this bin or before.

    With it a token is compared without a division. Bisects, 8 bits at a time.
    """
    low = tl.full((), 0, tl.int32)
    for step in range(4):
        shift = tl.maximum(23 - 8 * step, 0)
        bits = tl.minimum(low + (tl.arange(0, 256) << shift), 0x7F800000)
        gap = tl.div_rn(bits.to(tl.float32, bitcast=True), temperature)
        within = _bin_of(gap, origin, BINS) <= bin
        low += tl.maximum(tl.sum(within.to(tl.int32), axis=0) - 1, 0) << shift
        low = tl.minimum(low, 0x7F800000)
    return low


@triton.jit
def gather_kernel(
    logits, peaks, places, draws, owners, side, side_peaks, side_places, sums, bounds, begins, ids,
    width, stride, chunks,
    SHAPED: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Grid (rows, chunks): ``ids`` int32 ``[R, ROOM]``, the candidates, and the third of ``sums``
    for rows with tokens that are kept for sure."""
    after_earlier()
    number, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draw = draws + number * DRAW_VALUES
    if tl.load(draw + TEMPERATURE) > 0.0:
        row, best, _, _ = row_of(
            number, logits, peaks, places, width, stride, chunks,
            owners, side, side_peaks, side_places, SHAPED, CHUNKS,
        )  # fmt: skip
        at = number * chunks + chunk
        bounds += BOUNDS * number
        if (tl.abs(best) < _INFINITE) & (tl.load(bounds) >= 0):
            if _searched(draw, width) == 0:
                tl.store(sums + SUMS * at + 2, tl.load(sums + SUMS * at))
            else:
                near, far = tl.load(bounds + 2), tl.load(bounds + 3)
                temperature = temperature_of(draw)
                ids += number * ROOM + tl.load(begins + at)
                end = tl.minimum(chunk * CHUNK + CHUNK, width)
                weight = tl.zeros((PART,), tl.float64)
                for start in range(chunk * CHUNK, end, PART):
                    index = start + tl.arange(0, PART)
                    inside = index < end
                    x = tl.load(row + index, mask=inside, other=float("-inf"))
                    apart = bits_of(tl.abs(best - x))
                    chosen = (inside & (apart > near) & (apart <= far)).to(tl.int32)
                    count = tl.sum(chosen, axis=0)
                    if count > 0:
                        tl.store(ids + tl.cumsum(chosen, axis=0) - 1, index, mask=chosen > 0)
                        ids += count
                    if near >= 0:
                        gap = tl.abs(tl.div_rn(best - x, temperature))
                        weight += weights_of(gap, inside & (apart <= near))
                if near >= 0:
                    tl.store(sums + SUMS * at + 2, tl.sum(weight, axis=0))


@triton.jit
def _bounds(draw, bins, counts, total, origin, width, BINS: tl.constexpr):
    """The first bin that the row's first truncation does not keep as a whole, a bin after which
    nothing is kept, and whether another truncation follows.

    ``bins`` descend and have ``counts`` tokens; ``total``: the weights that ``min_p`` keeps. After
    the last bin there may be tokens without weight that are kept. A truncation has a last bin if
    all that it compares follows from the tokens up to there and ``total``, which is so for
    ``top_k``, and for ``typical_p`` and ``top_p`` if no other has chosen before. Without a
    truncation the first bin is ``BINS``. What XTC and ``typical_p`` keep is no prefix: with them it
    counts as if another followed.
    """
    surprise = tl.load(draw + MIROSTAT_MU)
    top_k = tl.load(draw + TOP_K).to(tl.int64, bitcast=True)
    typical_p, top_p = tl.load(draw + TYPICAL_P), tl.load(draw + TOP_P)
    several = (typical_p < 1.0) | (tl.load(draw + XTC_THRESHOLD) >= 0.0)
    last = _bin_of(tl.full((), _FAR, tl.float32), origin, BINS)
    cut = tl.full((), BINS, tl.int32)
    if surprise == surprise:
        last = tl.minimum(last, _bin_of(mirostat_gap(surprise, total), origin, BINS))
        cut, several = last, False
    else:
        last = tl.minimum(last, _bin_of(tl.maximum(min_p_gap(draw), 0.0), origin, BINS))
        begins = _begin_of(bins, origin)
        heaviest = tl.where(begins <= _FAR, counts * tl.exp(-begins), 0.0).to(tl.float64)
        if (top_k > 0) & (top_k < width):
            nearer = width - (tl.cumsum(counts, axis=0) - counts)  # in this bin or before
            last = tl.minimum(last, tl.sum((nearer < top_k).to(tl.int32), axis=0))
            cut, several = last, several | (top_p < 1.0)
        elif typical_p < 1.0:
            # Of the tokens up to twice the mean none is farther from the mean than another beyond
            # all of them: if they have the mass, they are all that is kept. One more bin, because
            # distances are rounded.
            ends = tl.where(bins < BINS - 1, _begin_of(bins + 1, origin), _FAR)
            mean = tl.sum(heaviest * tl.minimum(ends, _FAR), axis=0) / total
            twice = _bin_of((mean * 2.0 * _MORE).to(tl.float32), origin, BINS)
            enough = _bins_over(heaviest * _MORE, (1.0 - typical_p) * total)
            last = tl.minimum(last, tl.maximum(twice, enough) + 1)
            cut = cut * 0
        elif top_p < 1.0:
            rest = (1.0 - top_p) * total
            ends = _begin_of(bins + 1, origin)
            certain = (bins < last) & (ends <= _FAR)
            lightest = tl.where(certain, counts * tl.exp(-ends), 0.0).to(tl.float64)
            before = tl.sum(heaviest, axis=0) - (tl.cumsum(heaviest, axis=0) - heaviest)
            short = tl.sum((before * _MORE < top_p * total).to(tl.int32), axis=0)
            last = tl.minimum(last, _bins_over(heaviest * _MORE, rest))
            cut = tl.maximum(short, _bins_over(lightest, rest * _MORE))
            cut = tl.minimum(cut, last)
    return cut, last, several


@triton.jit
def _bins_over(weights, rest):
    """After how many bins the ``weights`` beyond, of descending bins, are more than ``rest``."""
    beyond = tl.cumsum(weights, axis=0) - weights
    return tl.sum((beyond > rest).to(tl.int32), axis=0)
