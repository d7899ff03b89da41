"""The loop shared by all attention kernels: a tile of queries against a run of keys.

``score = scale * q . k`` (soft-capped if requested); keys after a query or outside its window are
masked; online softmax in base 2 with the running maximum of Milakov & Gimelshein (2018).

Key tiles are aligned at position 0 and a masked key contributes exactly 0, so a row's result does
not depend on how its request was chunked or which rows share its tile. With and without masks the
arithmetic is the same: the one multiplication that a compiler might fuse with the subtraction after
it is fused here.

A code's scale that holds for a whole key or value is not multiplied into its 64 to 256 codes: the
key's is multiplied into the scores, the value's into the weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.page_codes import (
    FLOAT8_UNIT,
    INT4_UNIT,
    INT8_UNIT,
    load_scales,
    load_values,
    operand,
)
from sdk.kernels.gpu.pages import FLOAT, INT4, INT8

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_key(position, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Where the tiles begin of which the query at ``position`` sees anything."""
    return first_seen(position, window, WINDOW) // BLOCK_N * BLOCK_N


@triton.jit
def first_seen(position, window, WINDOW: tl.constexpr):
    """The first key that the query at ``position`` sees.

    ``WINDOW``: 0: all before it; 1: those less than ``window`` away; 2: from its last multiple on.
    """
    first = position * 0
    if WINDOW == 1:
        first = tl.maximum(position - window + 1, 0)
    elif WINDOW == 2:
        first = position // window * window
    return first


@triton.jit
def capped(score, softcap):
    """``softcap * tanh(score / softcap)`` by the exponential: its error is 1e-7 of the cap."""
    return softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E / softcap)) + 1.0))


@triton.jit
def begun(sinks, head, starts, BLOCK_M: tl.constexpr, SINKS: tl.constexpr):
    """The maximum and total of rows before any key; the first split of a row counts its sink."""
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        best = tl.where(starts, tl.load(sinks + head) * LOG2E, best)
        total = tl.where(starts, 1.0, total)
    return best, total


@triton.jit
def slope_of(slopes, head, scale, SOFTCAP: tl.constexpr):
    """The slopes of rows' heads, to be added to scores that the scale multiplies afterwards unless
    they have a soft cap."""
    slope = tl.load(slopes + head)
    if not SOFTCAP:
        slope = slope / scale
    return slope


@triton.jit
def _masked(score, key, at, sees, end, window, WINDOW: tl.constexpr, BOTH: tl.constexpr):
    hidden = (key >= end)[None, :]
    if sees is not None:
        hidden = (key[None, :] >= sees[:, None]) | hidden
    elif not BOTH:
        hidden = (key[None, :] > at[:, None]) | hidden
    if WINDOW == 2:
        hidden = hidden | (key[None, :] < (at // window * window)[:, None])
    elif WINDOW:
        hidden = hidden | (key[None, :] <= at[:, None] - window)
        if BOTH:
            hidden = hidden | (key[None, :] >= at[:, None] + window)
    return tl.where(hidden, float("-inf"), score)


@triton.jit
def _weights(score, best, factor):
    """Weights in base 2, by what earlier sums shrink, and the new maximum."""
    peak = tl.maximum(best, tl.max(score, axis=1) * factor)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    return tl.exp2(tl.fma(score, factor, -safe[:, None])), tl.exp2(best - safe), peak


@triton.jit
def places_of(table, start, seen, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Pages and slots ``[BLOCK_N]`` of the keys from ``start``, a multiple of ``BLOCK_N``, on.

    What does not change from tile to tile stands apart, so that it is computed once.
    """
    index = tl.arange(0, BLOCK_N)
    if BLOCK_N % PAGE == 0:
        at, slot = start // PAGE + index // PAGE, index % PAGE
    else:
        at, slot = (start + index) // PAGE, (start + index) % PAGE
    return tl.load(table + at, mask=seen, other=0).to(tl.int64), slot


@triton.jit
def attend(
    q, at, best, total, result, begin, end, table, head, scale, softcap, window, slope,
    k, k_scale, v, v_scale,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    K_STRIDES: tl.constexpr, V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr,
    V_DOT: tl.constexpr, V_STRIDES: tl.constexpr,
    CONVERT: tl.constexpr, WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, DECODES: tl.constexpr, BOTH: tl.constexpr = False, sees=None,
):  # fmt: skip
    """Queries ``q [M, BLOCK_D]`` at positions ``at [M]`` see the keys ``begin .. end - 1``.

    ``begin`` is a multiple of ``BLOCK_N``; without ``MASKED`` so is ``end``, and each query sees
    all these keys. ``best`` (base 2), ``total`` ``[M]`` and ``result [M, BLOCK_D]`` come in as they
    were before these keys and are returned. ``scale`` must be positive. ``slope [M]``: see
    ``slope_of``; ``None``: no linear biases. ``BOTH``: they see keys after them too.
    ``sees [M]``: how many keys from the first on; ``None``: up to their own.
    ``DECODES``, for one query: all warps share the few rows, so weights are added up by place in
    the tile, and across warps only at the end: three barriers less for each tile.
    """
    k_apart: tl.constexpr = (K_KIND != FLOAT) and (K_GROUP == 0)
    v_apart: tl.constexpr = (V_KIND != FLOAT) and (V_GROUP == 0)
    unit: tl.constexpr = (
        INT8_UNIT if V_KIND == INT8 else INT4_UNIT if V_KIND == INT4 else FLOAT8_UNIT
    )
    q = operand(q, K_DOT, WIDEN)
    totals = total
    if DECODES:
        totals = tl.where((tl.arange(0, BLOCK_N) == 0)[None, :], total[:, None], 0.0)
    factor = LOG2E if SOFTCAP else scale * LOG2E
    if v_apart:
        result = result * unit
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = key < end if MASKED else tl.full((BLOCK_N,), True, tl.int1)
        page, slot = places_of(table, start, seen, BLOCK_N, PAGE)
        keys = load_values(
            k, k_scale, page, head, slot, seen, K_STRIDES, q.shape[0],
            HEAD_DIM, BLOCK_D, BLOCK_N, K_KIND, K_GROUPS, K_GROUP, K_DOT, CONVERT, WIDEN,
        )  # fmt: skip
        score = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if k_apart:
            steps = load_scales(k_scale, page, head, slot, seen, K_STRIDES, K_KIND, K_GROUPS)
            score = score * steps[None, :]
        if SOFTCAP:
            score = capped(score * scale, softcap)
        if slope is not None:
            distance = tl.abs(key[None, :] - at[:, None]).to(tl.float32)
            score = tl.fma(-distance, slope[:, None], score)
        if MASKED:
            score = _masked(score, key, at, sees, end, window, WINDOW, BOTH)
        weight, shrink, best = _weights(score, best, factor)
        if DECODES:
            totals = totals * shrink[:, None] + weight
        else:
            total = total * shrink + tl.sum(weight, axis=1)
        values = load_values(
            v, v_scale, page, head, slot, seen, V_STRIDES, q.shape[0],
            HEAD_DIM, BLOCK_D, BLOCK_N, V_KIND, V_GROUPS, V_GROUP, V_DOT, CONVERT, WIDEN,
        )  # fmt: skip
        if v_apart:
            steps = load_scales(v_scale, page, head, slot, seen, V_STRIDES, V_KIND, V_GROUPS)
            weight = weight * (steps * unit)[None, :]
        weight = operand(weight, V_DOT, WIDEN)
        result = tl.dot(weight, values, result * shrink[:, None], input_precision="ieee")
    if v_apart:
        result = result * (1.0 / unit)
    if DECODES:
        total = tl.sum(totals, axis=1)
    return best, total, result
