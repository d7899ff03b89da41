"""What the sampler's kernels share: the row they read, its maximum, gaps and weights.

A row is split into chunks of :data:`~sdk.kernels.gpu.scratch.SAMPLER_CHUNK` logits, whatever the
number of rows, so that sums have one order of additions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.operators.sampling import FAR

_FAR = tl.constexpr(FAR)
_ALL = tl.constexpr(2**31 - 1)
_INFINITE = tl.constexpr(float("inf"))
#: Float64 values of a row's draw, in the order of ``DRAW``.
TEMPERATURE, MIN_P, TYPICAL_P, TOP_P = (tl.constexpr(i) for i in range(4))
XTC_THRESHOLD, MIROSTAT_MU, TOP_K, UNIFORM = (tl.constexpr(i) for i in range(4, 8))
DRAW_VALUES = tl.constexpr(8)


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
    after_earlier()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + index, mask=index < width, other=float("-inf"))
    at = row * chunks + chunk
    store_peak(x, index, width, peaks + at, places + at)


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
def row_of(
    number, logits, peaks, places, width, stride, chunks, owners, side, side_peaks, side_places,
    SHAPED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Where a row's logits are, their maximum, its first token, and the probability of a row that
    is not drawn from.

    ``SHAPED``: a row with a slot, in ``owners``, is that of ``side``, if its own maximum is finite.
    """
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
    return row, best, token, share


@triton.jit
def temperature_of(draw):
    """Float32; only of a row with a positive one."""
    return tl.maximum(tl.load(draw + TEMPERATURE), 1e-30).to(tl.float32)


@triton.jit
def gaps_of(row, index, inside, best, temperature):
    """Infinite for tokens that are not ``inside``; never -0.0, which has the bits of -2^31."""
    x = tl.load(row + index, mask=inside, other=float("-inf"))
    return tl.abs(tl.div_rn(best - x, temperature))


@triton.jit
def weights_of(gap, kept):
    """Float64, of float32 exponentials."""
    return tl.where(kept & (gap <= _FAR), tl.exp(-gap), 0.0).to(tl.float64)


@triton.jit
def bits_of(gap):
    """Numbers that are ordered like gaps, which are not negative."""
    return gap.to(tl.int32, bitcast=True)
