"""The loop all attention kernels share: a tile of queries against a run of keys, online softmax.

``score = scale * q . k`` (soft-capped where asked for), keys after a query or outside its window
hidden, softmax with the running maximum of Milakov & Gimelshein (2018) in base 2. The scale of a
key's code multiplies its column of scores and that of a value its column of weights, so codes go
into the matrix product as they are. Weights are divided by the tile's largest value scale first:
as float16 they would otherwise leave its range.

Key tiles are aligned at position 0 and a hidden key contributes exactly 0, so a row's result does
not depend on how its request was chunked or which rows share its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.pages import E4M3, FLOAT, load_values, operand

LOG2E = tl.constexpr(1.4426950408889634)
#: What the values of e4m3 bytes are short of: see ``pages.load_values``.
E4M3_FACTOR = tl.constexpr(256.0)


@triton.jit
def capped(score, softcap):
    """``softcap * tanh(score / softcap)`` by the exponential: its error is 1e-7 of the cap."""
    return softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E / softcap)) + 1.0))


@triton.jit
def attend(
    q, at, best, total, result, begin, end, table, k, v, k_scale, v_scale, head, stride_page,
    stride_head, stride_slot, scale_page, scale_head, scale, softcap, window,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    KIND: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Queries ``q [M, BLOCK_D]`` at positions ``at [M]`` see the keys ``begin .. end - 1``.

    ``begin`` is a multiple of ``BLOCK_N``. ``best`` (base 2), ``total`` ``[M]`` and ``result
    [M, BLOCK_D]`` come in as they were before these keys and are returned.
    """
    column = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = key < end
        page = tl.load(table + key // PAGE, mask=seen, other=0).to(tl.int64)
        slot = key % PAGE
        place = page * stride_page + head * stride_head + slot * stride_slot
        mask = seen[:, None] & (column < HEAD_DIM)[None, :]
        keys = load_values(k + place[:, None] + column[None, :], mask, KIND, DOT, WIDEN)
        score = tl.dot(q, tl.trans(keys), input_precision="ieee")
        if KIND != FLOAT:
            at_scale = page * scale_page + head * scale_head + slot
            step = tl.load(k_scale + at_scale, mask=seen, other=0.0).to(tl.float32)
            score *= (step * (scale * E4M3_FACTOR if KIND == E4M3 else scale))[None, :]
        else:
            score *= scale
        if SOFTCAP:
            score = capped(score, softcap)
        hidden = (key[None, :] > at[:, None]) | (key >= end)[None, :]
        if WINDOW:
            hidden = hidden | (key[None, :] <= at[:, None] - window)
        score = tl.where(hidden, float("-inf"), score * LOG2E)
        peak = tl.maximum(best, tl.max(score, axis=1))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        weight = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weight, axis=1)
        best = peak
        values = load_values(v + place[:, None] + column[None, :], mask, KIND, DOT, WIDEN)
        result = result * shrink[:, None]
        if KIND != FLOAT:
            step = tl.load(v_scale + at_scale, mask=seen, other=0.0).to(tl.float32)
            most = tl.max(step, axis=0)
            weight *= (step / tl.where(most > 0.0, most, 1.0))[None, :]
            weight = operand(weight, DOT, WIDEN)
            part = tl.dot(weight, values, input_precision="ieee")
            result += part * (most * E4M3_FACTOR if KIND == E4M3 else most)
        else:
            weight = operand(weight, DOT, WIDEN)
            result = tl.dot(weight, values, result, input_precision="ieee")
    return best, total, result
