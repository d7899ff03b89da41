"""What keys and values become in a page of codes, and back: the definition, in torch.

The codes of a head share scales, one for every group of dimensions. Integers of a group share one
step, so a head of them is mixed first (``mixed``); 8-bit floats have steps of their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sdk.kernels.kv_pages import KVPages, is_mixed, scale_group

#: The largest float16: a key, value or scale beyond it saturates instead of becoming inf.
HALF_MAX = 65504.0
#: What the largest value of a group becomes: the range of the codes, or enough of it (a float8_e5m2
#: goes to 57344, but then the scale of ordinary heads would be too small for a float16).
PEAKS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 448.0}
#: The bits of the largest and of the NaN scale of 4-bit codes.
_LARGEST, _NAN = 0xF7, 0xFF
_NO_FRACTIONS = 1.5 * 2**23


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


def encode(x: Tensor, dtype: torch.dtype, groups: int) -> tuple[Tensor, Tensor]:
    """``x [..., d]`` as codes of ``dtype``, as they lie in a page, and scales ``[..., groups]``.

    inf saturates. A NaN makes the scale of its group NaN (the codes 0), so that it stays visible as
    it does in a float page.
    """
    x = x.clamp(-HALF_MAX, HALF_MAX)
    return round_groups(mixed(x) if is_mixed(dtype) else x, dtype, groups)


def round_groups(x: Tensor, dtype: torch.dtype, groups: int) -> tuple[Tensor, Tensor]:
    """As :func:`encode` of finite ``x`` that is mixed already."""
    parts = torch.split(x, scale_group(x.shape[-1], groups), dim=-1)
    rounded = [
        round_nibbles(part) if dtype == torch.uint8 else round_codes(part, dtype) for part in parts
    ]
    codes = torch.cat([codes for codes, _ in rounded], dim=-1)
    scales = torch.stack([scale for _, scale in rounded], dim=-1)
    if dtype == torch.uint8:
        low, high = codes.chunk(2, dim=-1)
        codes = low | high << 4
    return codes, scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Float32 ``[..., d]`` of what :func:`encode` returned, still mixed."""
    if codes.dtype == torch.uint8:
        codes = torch.cat((codes & 15, codes >> 4), dim=-1)
    x = codes.to(torch.float32)
    group = scale_group(x.shape[-1], scales.shape[-1])
    wide = scales.repeat_interleave(group, dim=-1)[..., : x.shape[-1]]
    if scales.dtype != torch.int16:
        return x * wide.to(torch.float32)
    bits = wide.to(torch.int32)
    return short_scale(bits & 255) * (x - (bits >> 8 & 255) / 16.0)


def page_floats(pages: KVPages, index: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of these pages, float32 ``[n, kv_heads, page_size, head_dim]``."""
    found = []
    for codes, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        x = codes[index]
        if scale is None:
            found.append(x.to(torch.float32))
            continue
        groups = scale.shape[1] // x.shape[1]
        words = scale[index].view(*x.shape[:2], groups, pages.page_size)
        found.append(decode(x, words.transpose(2, 3)))
    return found[0], found[1]


def round_codes(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """``x [..., d]`` as codes, int8 or 8-bit floats, and their float16 scale: x ~ scale * code.

    The scale is the largest value's share of the codes' range (``PEAKS``), rounded to float16
    before the codes are chosen, so that its rounding is not an error of the values.
    """
    peak = PEAKS[dtype]
    scale = (x.abs().amax(dim=-1) / peak).clamp(max=HALF_MAX).to(torch.float16)
    wide = scale.to(torch.float32).unsqueeze(-1)
    inverse = torch.where(wide > 0, 1.0 / wide, 0.0)
    codes = (x * inverse).clamp(-peak, peak)
    if dtype == torch.int8:
        codes = _rounded(codes)
    return codes.masked_fill(wide.isnan(), 0.0).to(dtype), scale


def _rounded(x: Tensor) -> Tensor:
    """``torch.round`` of what is below 2**22, and beyond it not less: float32 has no fractions from
    2**23 on. ``torch.round`` itself wakes torch's threads on a CPU from 2,048 values on, other
    operations from 32,768: ``sdk/engine/rank/kv_transfer.py`` says what that costs.
    """
    return (x + _NO_FRACTIONS) - _NO_FRACTIONS


def short_scale(bits: Tensor) -> Tensor:
    """The upper 8 bits of a float16 without sign, int32 0..255, as float32."""
    return (bits << 7).to(torch.int16).view(torch.float16).to(torch.float32)


def round_nibbles(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x [..., d]`` as codes 0..15 (uint8) and scale and zero (int16): x ~ scale * (code - zero).

    Scale and zero take a byte each: two of them in the place of one float16 scale lower the KL
    divergence of SmolLM2 with int4 keys from 0.050 to 0.039. The middle of the range is code 7.5,
    so that both ends are as far off.
    """
    low, high = x.amin(dim=-1).clamp(max=0.0), x.amax(dim=-1).clamp(min=0.0)
    half = ((high - low) / 15.0).clamp(max=HALF_MAX).to(torch.float16)
    exact = half.view(torch.int16).to(torch.int32)
    bits = ((exact + 63 + (exact >> 7 & 1)) >> 7).clamp(max=_LARGEST)
    scale = short_scale(bits)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    middle = (high + low) * 0.5 * inverse
    zero = _rounded((7.5 - middle) * 16.0).clamp(0.0, 255.0)
    codes = _rounded(x * inverse.unsqueeze(-1) + (zero * 0.0625).unsqueeze(-1)).clamp(0.0, 15.0)
    unknown = x.isnan().any(dim=-1)
    codes = codes.masked_fill(unknown.unsqueeze(-1), 0.0).to(torch.uint8)
    word = (zero.nan_to_num().to(torch.int32) << 8 | bits).masked_fill(unknown, _NAN)
    return codes, word.to(torch.int16)
