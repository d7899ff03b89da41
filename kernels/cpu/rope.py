"""Rotary embedding with the KV write, and its angles: ``native/rope.hpp``."""

from __future__ import annotations

from ctypes import c_int32

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import AnglesArgs, OpKind
from sdk.kernels.cpu.page_args import RopeArgs
from sdk.kernels.cpu.pages import check_pages, inner_contiguous, page_sides, reject
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.checks import expect
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale


class RopeAndCache:
    """See :meth:`sdk.kernels.operators.ops.Ops.rope_and_cache`."""

    name = "cpu.rope_and_cache"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

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
        value_dim = v.shape[2]
        if v.shape[:2] != k.shape[:2] or q.shape[0] != tokens or q.shape[2] != head_dim:
            raise KernelError(
                f"rope: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not agree"
            )
        if cos.shape != (tokens, half) or sin.shape != cos.shape or 2 * half > head_dim:
            raise KernelError(
                f"rope: expected cos and sin [{tokens}, at most {head_dim // 2}], "
                f"found {list(cos.shape)} and {list(sin.shape)}"
            )
        if batch.slots.shape != (tokens,) or batch.slots.dtype != torch.int64:
            raise KernelError(f"rope: expected int64 slots [{tokens}], found {batch.slots.shape}")
        for name, x in (("q", q), ("k", k), ("v", v), ("cos", cos), ("sin", sin)):
            inner_contiguous(x, torch.float32, f"rope {name}")
        check_pages(pages, kv_heads or pages.k.shape[1], head_dim, value_dim)
        own = [None] * 3 if norms is None else [norms.q, norms.k, norms.v]
        weights = [None if norm is None else norm.weight for norm in own]
        if norms is not None and not norms.plain:
            raise KernelError("rope: expected RMSNorms with one weight for all heads")
        widths = (head_dim, head_dim, value_dim)
        for name, weight, width in zip("qkv", weights, widths, strict=True):
            if weight is not None:
                inner_contiguous(weight, torch.float32, f"rope {name} norm")
                expect(f"rope {name} norm", weight, torch.float32, width)
        slots, centre = batch.slots.contiguous(), pages.k_centre
        positions = None if scale is None else batch.positions.contiguous()
        args = RopeArgs(
            *(x.data_ptr() for x in (q, k, v, cos, sin, slots)),
            *(None if x is None else x.data_ptr() for x in (centre, *weights, positions)),
            None,
            page_sides(pages),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            0,
            0,
            pages.k.shape[0],
            1 if scale is None else scale.length,
            0 if scale is None else scale.shift,
            q.shape[1],
            kv_heads,
            head_dim,
            half,
            pages.page_size,
            value_dim,
            norms is not None and norms.after,
            0.0 if norms is None else norms.q.eps,
            0.0 if scale is None else scale.beta,
        )
        self._runtime.run(OpKind.ROPE, args, tokens, "rope_and_cache")


class LatentRopeAndCache:
    """See :meth:`sdk.kernels.operators.latent.LatentOps.rope_and_cache`."""

    name = "cpu.latent_rope_and_cache"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return reject(problem)

    def run(
        self,
        q: Tensor,
        turned: Tensor,
        latent: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        pages: KVPages,
        scale: QueryScale | None = None,
    ) -> None:
        tokens, heads, head_dim = q.shape
        kv_heads, value_dim = latent.shape[1:]
        named = {"q": q, "turned": turned, "latent": latent, "k": k, "cos": cos, "sin": sin}
        for name, x in named.items():
            inner_contiguous(x, torch.float32, f"latent rope {name}")
        check_pages(pages, kv_heads, head_dim, value_dim)
        slots, centre = batch.slots.contiguous(), pages.k_centre
        positions = None if scale is None else batch.positions.contiguous()
        args = RopeArgs(
            *(x.data_ptr() for x in (q, k, latent, cos, sin, slots)),
            None if centre is None else centre.data_ptr(),
            *((None,) * 3),
            None if positions is None else positions.data_ptr(),
            turned.data_ptr(),
            page_sides(pages),
            *q.stride()[:2],
            *k.stride()[:2],
            *latent.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *turned.stride()[:2],
            pages.k.shape[0],
            1 if scale is None else scale.length,
            0 if scale is None else scale.shift,
            heads,
            kv_heads,
            head_dim,
            cos.shape[1],
            pages.page_size,
            value_dim,
            False,
            0.0,
            0.0 if scale is None else scale.beta,
        )
        self._runtime.run(OpKind.ROPE, args, tokens, "latent_rope_and_cache")


class RopeAngles:
    """cos and sin of int64 positions: see :class:`sdk.kernels.reference.rope.RopeAngles`."""

    name = "cpu.rope_angles"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

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
        tokens, half = cos.shape
        inner_contiguous(positions, torch.int64, "rope positions")
        inner_contiguous(inv_freq, torch.float32, "rope inv_freq")
        fits = positions.shape[-1] == tokens and inv_freq.shape == (half,)
        if not fits or sin.shape != cos.shape:
            raise KernelError(
                f"rope angles: positions {list(positions.shape)} and inv_freq "
                f"{list(inv_freq.shape)} do not fit {list(cos.shape)} and {list(sin.shape)}"
            )
        if axes is not None:
            _check_axes(axes, positions if shifts is None else shifts, tokens)
        args = AnglesArgs(
            *(x.data_ptr() for x in (positions, inv_freq, cos, sin)),
            None if axes is None else axes.data_ptr(),
            None if shifts is None else shifts.data_ptr(),
            half,
            0 if positions.dim() == 1 else positions.stride(0),
            0 if shifts is None else shifts.stride(0),
            factor,
        )
        self._runtime.run(OpKind.ANGLES, args, tokens, "rope angles")


def _check_axes(axes: Tensor, rows: Tensor, tokens: int) -> None:
    """``rows``: what has a row for each axis."""
    inner_contiguous(axes, torch.int32, "rope axes")
    inner_contiguous(rows, rows.dtype, "rope positions")
    # an operator of torch could not be recorded
    used = (c_int32 * len(axes)).from_address(axes.data_ptr())
    low, high = min(used), max(used)
    if rows.shape != (rows.shape[0], tokens) or low < 0 or high >= rows.shape[0]:
        raise KernelError(
            f"rope angles: axes {low} to {high} of {tokens} tokens do not fit {list(rows.shape)}"
        )
