"""Rotary embedding, its angles, and the write of keys and values into their pages, in torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdk.kernels.batch import AttentionBatch
from sdk.kernels.layouts import KVPages
from sdk.kernels.registry import Problem

#: The largest float16: a key, value or scale beyond it saturates instead of becoming inf.
HALF_MAX = 65504.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: x ``[T, heads, head_dim]``, cos and sin ``[T, rotary_dim / 2]``."""
    half = cos.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)


class RopeAndCache:
    """See :meth:`sdk.kernels.ops.Ops.rope_and_cache`."""

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
    ) -> None:
        q.copy_(rotate(q, cos, sin))
        page = torch.div(batch.slots, pages.page_size, rounding_mode="floor")
        offset = batch.slots % pages.page_size
        k = rotate(k, cos, sin)
        if pages.k_scale is None or pages.v_scale is None:
            pages.k[page, :, offset] = _to_cache(k, pages.k.dtype)
            pages.v[page, :, offset] = _to_cache(v, pages.v.dtype)
            return
        q.copy_(mixed(q))
        k, v = (mixed(x.clamp(-HALF_MAX, HALF_MAX)) for x in (k, v))
        pages.k[page, :, offset], pages.k_scale[page, :, offset] = round_codes(k)
        pages.v[page, :, offset], pages.v_scale[page, :, offset] = round_codes(v)


def _to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float16:
        x = x.clamp(-HALF_MAX, HALF_MAX)
    return x.to(dtype)


def mixed(x: Tensor) -> Tensor:
    """``x [..., d]`` times the orthonormal Hadamard matrix of the largest power of two in d.

    Products of mixed vectors are those of the vectors, and mixing twice restores one. A few large
    channels would set the step of all others in int8: mixed, they are everybody's.
    """
    block = x.shape[-1] & -x.shape[-1]
    span = 1
    while span < block:
        pairs = x.reshape(*x.shape[:-1], -1, 2, span)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        span *= 2
    return x * (1.0 / math.sqrt(block))


def round_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [..., d]`` as int8 codes and their float16 scale ``[...]``: x ~ scale * code.

    The scale is the peak's 127th part, rounded to float16 before the codes are chosen, so that its
    rounding is not an error of the values. inf saturates. A NaN makes the scale NaN (the codes 0),
    so that it stays visible as it does in a float page.
    """
    scale = (x.abs().amax(dim=-1) / 127.0).clamp(max=HALF_MAX).to(torch.float16)
    wide = scale.to(torch.float32).unsqueeze(-1)
    inverse = torch.where(wide > 0, 1.0 / wide, 0.0)
    codes = torch.round((x * inverse).clamp(-127.0, 127.0))
    return codes.masked_fill(wide.isnan(), 0.0).to(torch.int8), scale


class RopeAngles:
    """cos and sin of rotary embedding.

    positions int64 ``[T]`` and inv_freq float32 ``[half]`` -> cos and sin float32 ``[T, half]``:
    ``factor * cos(position * inv_freq)``, the angle rounded to float32.
    """

    name = "reference.rope_angles"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self, positions: Tensor, inv_freq: Tensor, factor: float, cos: Tensor, sin: Tensor
    ) -> None:
        angle = positions.to(torch.float32).unsqueeze(1) * inv_freq
        cos.copy_(angle.cos() * factor)
        sin.copy_(angle.sin() * factor)
