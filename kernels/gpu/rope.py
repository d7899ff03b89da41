"""Rotary embedding fused with norms of heads and the write of keys and values to their pages, and
its angles.

Must match ``reference/rope.py``: q to 1 ulp of its type, page contents bit for bit from equal keys
and values (the same order of sums, ties to even), codes included.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.launch import after_earlier, expect_on_device, run_kernel
from sdk.kernels.gpu.page_codes import clamped, encode, mixed, round_bfloat16
from sdk.kernels.gpu.pages import FLOAT, INT4, hadamard_block, page_sides, reject
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.checks import expect
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale


@triton.jit
def _normalized(values, column, norm, eps, HEAD_DIM: tl.constexpr):
    """The RMSNorm of rows, which are 0 from ``HEAD_DIM`` on."""
    shrink = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)[:, None]
    return values * (shrink * tl.load(norm + column, mask=column < HEAD_DIM, other=0.0)[None, :])


@triton.jit
def _rotated(
    x, column, mask, angles, half, cos, sin, norm, eps,
    HEAD_DIM: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Rows at ``x``, their halves turned against each other. ``angles``: offset of the token's.

    ``NORM``: of the rows' RMSNorm with the weights ``norm``, or with ``AFTER`` that of the result.
    """
    turned = column < 2 * half
    first = column < half
    partner = tl.where(first, column + half, column - half)
    values = tl.load(x + column[None, :], mask=mask, other=0.0).to(tl.float32)
    others = tl.load(x + partner[None, :], mask=mask & turned[None, :], other=0.0).to(tl.float32)
    if NORM and not AFTER:
        shrink = tl.rsqrt(tl.sum(values * values, axis=1) / HEAD_DIM + eps)[:, None]
        values *= shrink * tl.load(norm + column, mask=column < HEAD_DIM, other=0.0)[None, :]
        others *= shrink * tl.load(norm + partner, mask=turned, other=0.0)[None, :]
    angle = angles + tl.where(first, column, column - half)
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    values = values * c[None, :] + others * tl.where(first, -s, s)[None, :]
    if NORM and AFTER:
        values = _normalized(values, column, norm, eps, HEAD_DIM)
    return values


@triton.jit
def _write(
    x, codes, scales, slot, head, real, page_stride, head_stride, slot_stride, scale_page,
    scale_group,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
    KIND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """One token's rows ``x [ROWS, BLOCK_D]`` into their slot of the pages."""
    column = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (column < HEAD_DIM)[None, :]
    place = slot // PAGE * page_stride + head * head_stride + slot % PAGE * slot_stride
    target = codes + place[:, None] + column[None, :]
    if KIND == FLOAT:
        if codes.dtype.element_ty == tl.float16:
            x = clamped(x)
        elif codes.dtype.element_ty == tl.bfloat16:
            x = round_bfloat16(x)  # not every target's conversion rounds
        tl.store(target, x.to(codes.dtype.element_ty), mask=mask)
    else:
        x = clamped(x)
        if MIX:
            x = mixed(x, ROWS, BLOCK_D, MIX)
        size: tl.constexpr = BLOCK_D if GROUP == 0 else GROUP
        values, steps = encode(tl.reshape(x, (ROWS, BLOCK_D // size, size)), KIND)
        values = tl.reshape(values, (ROWS, BLOCK_D))
        group = tl.arange(0, BLOCK_D // size)
        row = head[:, None] * GROUPS + group[None, :]
        at_scale = scales + slot // PAGE * scale_page + row * scale_group + slot % PAGE
        tl.store(at_scale, steps, mask=real[:, None] & (group < GROUPS)[None, :])
        if KIND == INT4:
            half: tl.constexpr = HEAD_DIM // 2
            other = tl.minimum(column + half, BLOCK_D - 1)[None, :]
            upper = tl.gather(values, tl.broadcast_to(other, (ROWS, BLOCK_D)), 1)
            values = (values | (upper << 4)).to(tl.uint8)
            mask = mask & (column < half)[None, :]
        tl.store(target, values, mask=mask)


#: For latent pages.
write_rows = _write


@triton.jit
def rope_kernel(
    q, k, v, cos, sin, slots, k_centre, q_norm, k_norm, v_norm, eps, positions, beta, length, shift,
    q_token, q_head, k_token, k_head, v_token, v_head, cos_token, heads, kv_heads, half,
    k_codes, k_scale, k_page, k_row, k_slot, k_scale_page, k_scale_group,
    v_codes, v_scale, v_page, v_row, v_slot, v_scale_page, v_scale_group,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_MIX: tl.constexpr,
    V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr, V_MIX: tl.constexpr,
    PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    CENTRE: tl.constexpr, NORM: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of heads of q, then of k, then of v). q is turned in place.

    ``NORM``, ``AFTER``: whether q and k have norms, and where. With ``positions`` q is multiplied
    by ``1 + beta * log(1 + (position + shift) // length)``. ``MIX``: the Hadamard block of what
    lies mixed, else 0; q is mixed where keys are.
    """
    after_earlier()
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
        turned = _rotated(
            queries, column, mask, angles, half, cos, sin, q_norm, eps, HEAD_DIM, NORM, AFTER
        )
        if positions is not None:
            steps = (tl.load(positions + token) + shift) // length
            turned *= 1.0 + beta * tl.log(1.0 + steps.to(tl.float32))
        if K_MIX:
            turned = mixed(turned, BLOCK_H, BLOCK_D, K_MIX)
        tl.debug_barrier()  # a thread reads what another overwrites
        tl.store(queries + column[None, :], turned, mask=mask)
    else:
        slot = tl.load(slots + token)
        is_key = part < tiles + kv_tiles
        head = (part - tiles - tl.where(is_key, 0, kv_tiles)) * BLOCK_H + row
        real = (head < kv_heads) & (slot >= 0)  # -1: see places_kernel
        mask = real[:, None] & (column < HEAD_DIM)[None, :]
        if is_key:
            keys = k + token * k_token + head[:, None] * k_head
            turned = _rotated(
                keys, column, mask, angles, half, cos, sin, k_norm, eps, HEAD_DIM, NORM, AFTER
            )
            if CENTRE:
                at_centre = head[:, None] * HEAD_DIM + column[None, :]
                turned -= tl.load(k_centre + at_centre, mask=mask, other=0.0)
            _write(
                turned, k_codes, k_scale, slot, head, real,
                k_page, k_row, k_slot, k_scale_page, k_scale_group,
                PAGE, HEAD_DIM, BLOCK_H, BLOCK_D, K_KIND, K_GROUPS, K_GROUP, K_MIX,
            )  # fmt: skip
        else:
            at_value = token * v_token + head[:, None] * v_head + column[None, :]
            values = tl.load(v + at_value, mask=mask, other=0.0).to(tl.float32)
            if v_norm is not None:
                values = _normalized(values, column, v_norm, eps, HEAD_DIM)
            _write(
                values, v_codes, v_scale, slot,
                head, real, v_page, v_row, v_slot, v_scale_page, v_scale_group,
                PAGE, HEAD_DIM, BLOCK_H, BLOCK_D, V_KIND, V_GROUPS, V_GROUP, V_MIX,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "axis_stride", "shift_stride"])
def angles_kernel(
    positions, inv_freq, cos, sin, axes, shifts, factor, tokens, axis_stride, shift_stride,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``factor`` times cos and sin of ``float32(position) * inv_freq``. With ``axes`` frequency i
    turns by the positions of that axis, to which its ``shifts`` are added. Strides: from one axis
    to the next."""
    after_earlier()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < tokens * HALF
    token = index // HALF
    if axes is not None:
        axis = tl.load(axes + index % HALF, mask=mask, other=0)
        place = tl.load(positions + axis * axis_stride + token, mask=mask, other=0)
        if shifts is not None:
            place += tl.load(shifts + axis * shift_stride + token, mask=mask, other=0)
    else:
        place = tl.load(positions + token, mask=mask, other=0)
    position = place.to(tl.float32)
    angle = position * tl.load(inv_freq + index % HALF, mask=mask, other=0.0)
    tl.store(cos + index, tl.cos(angle) * factor, mask=mask)
    tl.store(sin + index, tl.sin(angle) * factor, mask=mask)


def _scale_of(scale: QueryScale, batch: AttentionBatch) -> tuple[Any, ...]:
    return batch.positions, scale.beta, scale.length, scale.shift


class RopeAndCache:
    """See :meth:`sdk.kernels.operators.ops.Ops.rope_and_cache`."""

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
        norms: HeadNorms | None = None,
        scale: QueryScale | None = None,
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
        keys, values = page_sides(pages, head_dim)
        centre = pages.k_centre
        if centre is not None and kv_heads:
            expect("rope k_centre", centre, torch.float32, kv_heads, head_dim)
        mix = hadamard_block(head_dim)
        own = [None] * 3 if norms is None else [norms.q, norms.k, norms.v]
        weights = [None if norm is None else norm.weight for norm in own]
        if norms is not None and not norms.plain:
            raise KernelError("rope: expected RMSNorms with one weight for all heads")
        for name, weight in zip("qkv", weights, strict=True):
            if weight is not None:
                expect(f"rope {name} norm", weight, torch.float32, head_dim)
        expect_on_device("rope", q, k, v, cos, sin, batch.slots, pages.k, centre, *weights)
        block = max(16, triton.next_power_of_2(head_dim))
        rows = max(1, min(8, 1024 // block, triton.next_power_of_2(kv_heads or q.shape[1])))
        grid = (tokens, triton.cdiv(q.shape[1], rows) + 2 * triton.cdiv(kv_heads, rows))
        run_kernel(
            rope_kernel,
            grid,
            *(q, k, v, cos, sin, batch.slots),
            *(centre, *weights, 0.0 if norms is None else norms.q.eps),
            *((None,) * 4 if scale is None else _scale_of(scale, batch)),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos.stride(0),
            q.shape[1],
            kv_heads,
            half,
            *(keys.codes, keys.scales, *keys.strides),
            *(values.codes, values.scales, *values.strides),
            K_KIND=keys.kind,
            K_GROUPS=keys.groups,
            K_GROUP=keys.group,
            K_MIX=mix if keys.mixed else 0,
            V_KIND=values.kind,
            V_GROUPS=values.groups,
            V_GROUP=values.group,
            V_MIX=mix if values.mixed else 0,
            PAGE=pages.page_size,
            HEAD_DIM=head_dim,
            BLOCK_D=block,
            BLOCK_H=rows,
            CENTRE=centre is not None,
            NORM=norms is not None,
            AFTER=norms is not None and norms.after,
            num_warps=4,
            enable_fp_fusion=False,  # codes of pages are the reference's, see page_codes.py
        )


class RopeAngles:
    """cos and sin of int64 positions: see :class:`sdk.kernels.reference.rope.RopeAngles`."""

    name = "gpu.rope_angles"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        positions: Tensor,
        inv_freq: Tensor,
        factor: float,
        cos: Tensor,
        sin: Tensor,
        axes: Tensor | None = None,
        shifts: Tensor | None = None,
    ) -> None:
        expect_on_device("rope angles", positions, inv_freq, cos, sin, axes, shifts)
        tokens, half = cos.shape
        block = 256
        run_kernel(
            angles_kernel,
            (triton.cdiv(tokens * half, block),),
            positions if positions.stride(-1) == 1 else positions.contiguous(),
            inv_freq,
            cos,
            sin,
            axes,
            shifts,
            factor,
            tokens,
            0 if positions.dim() == 1 else positions.stride(0),
            0 if shifts is None else shifts.stride(0),
            HALF=half,
            BLOCK=block,
        )


OPS: dict[str, tuple[Any, ...]] = {
    "rope_and_cache": (RopeAndCache(),),
    "rope_angles": (RopeAngles(),),
}
