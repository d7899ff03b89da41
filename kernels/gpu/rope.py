"""Rotary embedding fused with the write of keys and values into their pages, and its angles.

Must match ``reference/rope.py``: q to 1 ulp, page contents bit for bit from equal keys and values
(the same order of sums, ties to even), int8 and 8-bit float codes included.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.batch import AttentionBatch
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.launch import expect_on_device
from sdk.kernels.gpu.pages import (
    FLOAT,
    INT8,
    check_pages,
    hadamard_block,
    kind,
    mixed,
    page_arguments,
    reject,
    round_bfloat16,
    to_codes,
)
from sdk.kernels.layouts import KVPages
from sdk.kernels.registry import Problem

_HALF_MAX = tl.constexpr(65504.0)
#: What a row's largest value becomes: see ``reference/rope.py``.
_INT8_PEAK = tl.constexpr(127.0)
_FLOAT8_PEAK = tl.constexpr(448.0)


@triton.jit
def _clamped(x):
    """Within the range of float16; NaN stays."""
    return tl.where(x > _HALF_MAX, _HALF_MAX, tl.where(x < -_HALF_MAX, -_HALF_MAX, x))


@triton.jit
def _rotated(x, column, mask, angles, half, cos, sin):
    """Rows at ``x``, their halves turned against each other. ``angles``: offset of the token's."""
    turned = column < 2 * half
    first = column < half
    partner = tl.where(first, column + half, column - half)
    values = tl.load(x + column[None, :], mask=mask, other=0.0)
    others = tl.load(x + partner[None, :], mask=mask & turned[None, :], other=0.0)
    angle = angles + tl.where(first, column, column - half)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    return values * c[None, :] + others * tl.where(first, -s, s)[None, :]


@triton.jit
def _write(
    x, pages, scales, place, scale_place, column, real, mask,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """One token's rows ``x [ROWS, BLOCK_D]`` into their slot of the pages."""
    target = pages + place[:, None] + column[None, :]
    if KIND == FLOAT:
        if pages.dtype.element_ty == tl.float16:
            x = _clamped(x)
        elif pages.dtype.element_ty == tl.bfloat16:
            x = round_bfloat16(x)  # not every target's conversion rounds
        tl.store(target, x.to(pages.dtype.element_ty), mask=mask)
    else:
        x = mixed(_clamped(x), ROWS, BLOCK_D, MIX)
        most: tl.constexpr = _INT8_PEAK if KIND == INT8 else _FLOAT8_PEAK
        peak = tl.max(tl.where(mask, tl.abs(x), 0.0), axis=1)
        broken = tl.max((x != x).to(tl.int32), axis=1) > 0
        step = tl.minimum(tl.div_rn(peak, most), _HALF_MAX)
        step = tl.where(broken, float("nan"), step).to(tl.float16)
        tl.store(scales + scale_place, step, mask=real)
        wide = step.to(tl.float32)
        inverse = tl.where(wide > 0.0, tl.div_rn(1.0, wide), 0.0)
        x = tl.where(broken[:, None], 0.0, x * inverse[:, None])
        x = tl.minimum(tl.maximum(x, -most), most)
        tl.store(target, to_codes(x, KIND), mask=mask)


@triton.jit
def rope_kernel(
    q, k, v, cos, sin, slots, k_pages, v_pages, k_scales, v_scales, q_token, q_head, k_token,
    k_head, v_token, v_head, cos_token, stride_page, stride_head, stride_slot, scale_page,
    scale_head, heads, kv_heads, half,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    KIND: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of heads of q, then of k, then of v). q is turned in place."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.cdiv(heads, BLOCK_H)
    kv_tiles = tl.cdiv(kv_heads, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    row = tl.arange(0, BLOCK_H)
    angles = token * cos_token
    if part < tiles:
        head = part * BLOCK_H + row
        mask = (head < heads)[:, None] & (column < HEAD_DIM)[None, :]
        queries = q + token * q_token + head[:, None] * q_head
        turned = _rotated(queries, column, mask, angles, half, cos, sin)
        if KIND != FLOAT:
            turned = mixed(turned, BLOCK_H, BLOCK_D, MIX)
        tl.debug_barrier()  # a thread reads what another overwrites
        tl.store(queries + column[None, :], turned, mask=mask)
    else:
        slot = tl.load(slots + token)
        is_key = part < tiles + kv_tiles
        head = (part - tiles - tl.where(is_key, 0, kv_tiles)) * BLOCK_H + row
        real = (head < kv_heads) & (slot >= 0)  # -1: see places_kernel
        mask = real[:, None] & (column < HEAD_DIM)[None, :]
        place = slot // PAGE * stride_page + head * stride_head + slot % PAGE * stride_slot
        at_scale = slot // PAGE * scale_page + head * scale_head + slot % PAGE
        if is_key:
            keys = k + token * k_token + head[:, None] * k_head
            turned = _rotated(keys, column, mask, angles, half, cos, sin)
            _write(
                turned, k_pages, k_scales, place, at_scale, column, real, mask, BLOCK_H, BLOCK_D,
                KIND, MIX,
            )  # fmt: skip
        else:
            at_value = token * v_token + head[:, None] * v_head + column[None, :]
            values = tl.load(v + at_value, mask=mask, other=0.0)
            _write(
                values, v_pages, v_scales, place, at_scale, column, real, mask, BLOCK_H, BLOCK_D,
                KIND, MIX,
            )  # fmt: skip


@triton.jit
def angles_kernel(
    positions, inv_freq, cos, sin, factor, tokens, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """``factor`` times cos and sin of ``float32(position) * inv_freq``."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < tokens * HALF
    position = tl.load(positions + index // HALF, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq + index % HALF, mask=mask, other=0.0)
    tl.store(cos + index, tl.cos(angle) * factor, mask=mask)
    tl.store(sin + index, tl.sin(angle) * factor, mask=mask)


class RopeAndCache:
    """See :meth:`sdk.kernels.ops.Ops.rope_and_cache`."""

    name = "gpu.rope_and_cache"

    def reject(self, problem: Problem) -> str | None:
        return reject(problem)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        pages: KVPages,
    ) -> None:
        tokens, kv_heads, head_dim = k.shape
        half = cos.shape[1]
        if v.shape != k.shape or q.shape[2] != head_dim or 2 * half > head_dim:
            raise KernelError(
                f"rope: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} and "
                f"cos {list(cos.shape)} do not agree"
            )
        if any(x.stride(-1) != 1 for x in (q, k, v, cos)) or cos.stride() != sin.stride():
            raise KernelError("rope: expected contiguous heads and angles of the same strides")
        check_pages(pages, kv_heads, head_dim)
        expect_on_device("rope", q, k, v, cos, sin, batch.slots, pages.k)
        block = max(16, triton.next_power_of_2(head_dim))
        rows = max(1, min(8, 1024 // block, triton.next_power_of_2(kv_heads)))
        grid = (tokens, triton.cdiv(q.shape[1], rows) + 2 * triton.cdiv(kv_heads, rows))
        rope_kernel[grid](
            *(q, k, v, cos, sin, batch.slots),
            *page_arguments(pages)[:4],
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos.stride(0),
            *page_arguments(pages)[4:],
            q.shape[1],
            kv_heads,
            half,
            PAGE=pages.page_size,
            HEAD_DIM=head_dim,
            BLOCK_D=block,
            BLOCK_H=rows,
            KIND=kind(pages),
            MIX=hadamard_block(head_dim),
            num_warps=4,
        )


class RopeAngles:
    """cos and sin of int64 positions: see :class:`sdk.kernels.reference.rope.RopeAngles`."""

    name = "gpu.rope_angles"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self, positions: Tensor, inv_freq: Tensor, factor: float, cos: Tensor, sin: Tensor
    ) -> None:
        expect_on_device("rope angles", positions, inv_freq, cos, sin)
        tokens, half = cos.shape
        block = 256
        angles_kernel[(triton.cdiv(tokens * half, block),)](
            positions.contiguous(), inv_freq, cos, sin, factor, tokens, HALF=half, BLOCK=block
        )


OPS: dict[str, tuple[Any, ...]] = {
    "rope_and_cache": (RopeAndCache(),),
    "rope_angles": (RopeAngles(),),
}
