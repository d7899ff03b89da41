"""Rotary embedding, its angles, and the write of keys and values to their pages, in torch."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale
from sdk.kernels.operators.norm import Norm
from sdk.kernels.reference.norm import Normalize
from sdk.kernels.reference.page_codes import encode, mixed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x ``[T, heads, head_dim]``, cos and sin ``[T, rotary_dim / 2]``."""
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


def _normalized(x: Tensor, norm: Norm | None) -> Tensor:
    """Heads ``[T, heads, head_dim]`` in float32, with a norm if there is one."""
    x = x.float()
    if norm is None:
        return x
    out = torch.empty_like(x)
    Normalize().run(x, norm, out)
    return out


def _turned(x: Tensor, cos: Tensor, sin: Tensor, norm: Norm | None, after: bool) -> Tensor:
    """Heads in float32 after their rotation and a norm, which comes before it or ``after`` it."""
    if after:
        return _normalized(rotate(x.float(), cos, sin), norm)
    return rotate(_normalized(x, norm), cos, sin)


class RopeAndCache:
    """See :meth:`sdk.kernels.operators.ops.Ops.rope_and_cache`."""

    name = "reference.rope_and_cache"

    def reject(self, problem: Problem) -> str | None:
        return None

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
        after = norms is not None and norms.after
        turned = _turned(q, cos, sin, None if norms is None else norms.q, after)
        if scale is not None:
            times = torch.div(
                batch.positions + scale.shift, scale.length, rounding_mode="floor"
            ).float()
            turned = turned * (1.0 + scale.beta * torch.log1p(times))[:, None, None]
        q.copy_(mixed(turned) if pages.k_mixed else turned)
        if not k.shape[1]:
            return
        page = torch.div(batch.slots, pages.page_size, rounding_mode="floor")
        offset = batch.slots % pages.page_size
        k = _turned(k, cos, sin, None if norms is None else norms.k, after)
        v = _normalized(v, None if norms is None else norms.v)
        if pages.k_centre is not None:
            k = k - pages.k_centre
        keys = k, pages.k, pages.k_scale, pages.k_type, pages.k_mixed
        values = v, pages.v, pages.v_scale, pages.v_type, pages.v_mixed
        for x, to, scales, kind, mix in (keys, values):
            groups = 0 if scales is None else scales.shape[1] // to.shape[1]
            to[page, :, offset], steps = encode(x, kind, groups, mix=mix)
            if scales is not None and steps is not None:
                scales[page, :, offset] = steps.flatten(1)


class LatentRopeAndCache:
    """See :meth:`sdk.kernels.operators.latent.LatentOps.rope_and_cache`."""

    name = "reference.latent_rope_and_cache"

    def reject(self, problem: Problem) -> str | None:
        return None

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
        value_dim = latent.shape[2]
        whole = torch.cat((q[..., :value_dim].float(), rotate(turned.float(), cos, sin)), dim=-1)
        if scale is not None:
            times = torch.div(batch.positions, scale.length, rounding_mode="floor").float()
            whole = whole * (1.0 + scale.beta * torch.log1p(times))[:, None, None]
        q.copy_(mixed(whole, value_dim) if pages.k_mixed else whole)
        key = torch.cat((latent.float(), rotate(k.float(), cos, sin)), dim=-1)
        if pages.k_centre is not None:
            key = key - pages.k_centre
        page = torch.div(batch.slots, pages.page_size, rounding_mode="floor")
        offset = batch.slots % pages.page_size
        groups = 0 if pages.k_scale is None else pages.k_scale.shape[1] // pages.k.shape[1]
        codes, steps = encode(key, pages.k_type, groups, mix=pages.k_mixed, also=value_dim)
        pages.k[page, :, offset] = codes
        if pages.k_scale is not None and steps is not None:
            pages.k_scale[page, :, offset] = steps.flatten(1)


class RopeAngles:
    """cos and sin of rotary embedding.

    positions int64 ``[T]`` and inv_freq float32 ``[half]`` -> cos and sin float32 ``[T, half]``:
    ``factor * cos(position * inv_freq)``, the angle rounded to float32. With ``axes``, int32
    ``[half]``, positions are ``[axes, T]``, and frequency i turns by those of axis ``axes[i]``;
    with ``shifts``, int32 ``[axes, T]``, they are ``[T]``, and the shifts are added.
    """

    name = "reference.rope_angles"

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
        if shifts is not None:
            positions = positions + shifts
        own = positions.unsqueeze(1) if axes is None else positions[axes.long()].T
        angle = own.to(torch.float32) * inv_freq
        cos.copy_(angle.cos() * factor)
        sin.copy_(angle.sin() * factor)
