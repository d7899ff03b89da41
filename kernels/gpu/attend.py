"""The loop shared by all attention kernels: a tile of queries against a run of keys.

``score = scale * q . k`` (soft-capped if requested); keys after a query or outside its window are
masked; online softmax in base 2 with the running maximum of Milakov & Gimelshein (2018).

Key tiles are aligned at position 0 and a masked key contributes exactly 0, so a row's result does
not depend on how its request was chunked or which rows share its tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.page_codes import load_values, operand

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(score, softcap):
    """``softcap * tanh(score / softcap)`` by the exponential: its error is 1e-7 of the cap."""
    return softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * LOG2E / softcap)) + 1.0))


@triton.jit
def attend(
    q, at, best, total, result, begin, end, table, head, scale, softcap, window,
    k, k_scale, k_page, k_head, k_slot, k_scale_page, k_scale_group,
    v, v_scale, v_page, v_head, v_slot, v_scale_page, v_scale_group,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr, V_DOT: tl.constexpr,
    WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Queries ``q [M, BLOCK_D]`` at positions ``at [M]`` see the keys ``begin .. end - 1``.

    ``begin`` is a multiple of ``BLOCK_N``. ``best`` (base 2), ``total`` ``[M]`` and ``result
    [M, BLOCK_D]`` come in as they were before these keys and are returned.
    """
    q = operand(q, K_DOT, WIDEN)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = key < end
        page = tl.load(table + key // PAGE, mask=seen, other=0).to(tl.int64)
        slot = key % PAGE
        keys = load_values(
            k, k_scale, page, head, slot, seen, k_page, k_head, k_slot, k_scale_page, k_scale_group,
            HEAD_DIM, BLOCK_D, BLOCK_N, K_KIND, K_GROUPS, K_GROUP, K_DOT, WIDEN,
        )  # fmt: skip
        score = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
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
        values = load_values(
            v, v_scale, page, head, slot, seen, v_page, v_head, v_slot, v_scale_page, v_scale_group,
            HEAD_DIM, BLOCK_D, BLOCK_N, V_KIND, V_GROUPS, V_GROUP, V_DOT, WIDEN,
        )  # fmt: skip
        weight = operand(weight, V_DOT, WIDEN)
        result = tl.dot(weight, values, result * shrink[:, None], input_precision="ieee")
    return best, total, result
