"""Dequantizes packed weights: the definition that every kernel must reproduce.

Sources: ggml's block structs (ggml-common.h, ggml-quants.c) for the blocks. All arithmetic is
float32 in the order of those decoders, so that results are equal bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks, Dense, Float8, Layout


def unpack_codes(codes: Tensor, bits: int, count: int) -> Tensor:
    """Rows of an LSB-first bit stream, uint8 ``[N, bytes]`` -> codes, uint8 ``[N, count]``."""
    if bits == 8:
        return codes[:, :count]
    if bits == 4:
        pairs = torch.stack((codes & 15, codes >> 4), dim=2)
        return pairs.reshape(codes.shape[0], -1)[:, :count]
    shifts = torch.arange(8, dtype=torch.uint8, device=codes.device)
    stream = ((codes.unsqueeze(2) >> shifts) & 1).reshape(codes.shape[0], -1)
    planes = stream[:, : count * bits].reshape(codes.shape[0], count, bits)
    weights = 1 << torch.arange(bits, dtype=torch.uint8, device=codes.device)
    return (planes * weights).sum(dim=2, dtype=torch.uint8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`unpack_codes`: codes ``[N, count]`` -> uint8 ``[N, bytes]``."""
    rows, count = codes.shape
    if bits == 8:
        return codes.contiguous()
    if bits == 4:
        if count % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[:, 0::2] | (codes[:, 1::2] << 4)
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    stream = ((codes.unsqueeze(2) >> shifts) & 1).reshape(rows, count * bits)
    stream = torch.nn.functional.pad(stream, (0, -(count * bits) % 8)).reshape(rows, -1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=codes.device)
    return (stream * weights).sum(dim=2, dtype=torch.uint8)


def cut_codes(codes: Tensor, bits: int, start: int, end: int) -> Tensor:
    """Codes ``start:end`` of every row of a stream; a view if they begin at a byte."""
    if start * bits % 8 == 0:
        return codes[:, start * bits // 8 : -(-end * bits // 8)]
    return pack_codes(unpack_codes(codes, bits, end)[:, start:end], bits)


def decode(layout: Layout) -> Tensor:
    """The weight as float32 ``[N, K]``."""
    match layout:
        case Dense():
            return layout.values.to(torch.float32)
        case Float8():
            scale = row_scales(layout).to(torch.float32)
            scale = scale.repeat_interleave(min(layout.block[1], layout.shape[1]), 1)
            return layout.values.to(torch.float32) * scale[:, : layout.shape[1]]
        case Affine():
            return _decode_affine(layout)
        case Blocks():
            return _decode_blocks(layout)


def row_scales(w: Float8) -> Tensor:
    """The scales of every row, in their own type: ``[N, ceil(K / bk)]``."""
    rows = w.shape[0]
    return w.scale[torch.arange(rows, device=w.scale.device) // w.block[0]]


def _decode_affine(w: Affine) -> Tensor:
    rows, columns = w.shape
    if w.repeats:
        w = with_rows(w, torch.arange(rows, device=w.codes.device))
    codes = unpack_codes(w.codes, w.bits, columns)
    if w.signed:
        codes = codes.view(torch.int8)
    groups = w.scale.shape[1]
    short = groups * w.group - columns
    values = codes.to(torch.float32) if w.table is None else w.table[codes.to(torch.int64)]
    if short:
        values = torch.nn.functional.pad(values, (0, short))
    values = values.reshape(rows, groups, w.group)
    scale = group_scales(w).unsqueeze(2)
    if w.minus is not None:
        values = values * scale - w.minus.to(torch.float32).unsqueeze(2)
    elif w.zeros is not None:
        values = (values - zero_points(w, w.zeros).unsqueeze(2)) * scale
    else:
        values = (values - float(w.zero)) * scale
    return values.reshape(rows, groups * w.group)[:, :columns].contiguous()


def with_rows(w: Affine, rows: Tensor) -> Affine:
    """The weight ``w``, whose scales repeat, with scales for each of its rows. ``rows`` (int64):
    the indices of its rows in the larger weight."""
    of = rows % w.scale.shape[0]
    zeros = None if w.zeros is None else w.zeros[of]
    minus = None if w.minus is None else w.minus[of]
    return replace(w, scale=w.scale[of], zeros=zeros, minus=minus)


def zero_points(w: Affine, zeros: Tensor) -> Tensor:
    """The ``zeros`` of all groups, unpacked: float32 ``[N, ceil(K / group)]``."""
    if not zeros.is_floating_point():
        zeros = unpack_codes(zeros, w.bits, w.scale.shape[1])
    return zeros.to(torch.float32)


def group_scales(w: Affine) -> Tensor:
    """Both levels of scales multiplied: float32 ``[N, ceil(K / group)]``."""
    if w.scale_table is not None:
        assert w.scale_offset is not None
        codes = w.scale.to(torch.int64)
        supers = nested_supers(w, torch.arange(w.shape[0], device=codes.device))
        return w.scale_table[codes] * supers + w.scale_offset.unsqueeze(1)
    scale = w.scale.to(torch.float32)
    if w.super_scale is None:
        return scale
    of = torch.arange(scale.shape[1], device=scale.device) * w.group // w.super_group
    return w.super_scale.to(torch.float32)[:, of] * scale


def nested_supers(w: Affine, rows: Tensor) -> Tensor:
    """Super scales that continue over row ends, one for every scale of ``rows``.

    int64 ``[T]`` -> float32 ``[T, K / group]``.
    """
    assert w.super_scale is not None
    groups = w.scale.shape[1]
    scales = rows.unsqueeze(1) * groups + torch.arange(groups, device=rows.device)
    return w.super_scale[scales // (w.super_group // w.group)]


def flat_scales(w: Affine) -> Affine:
    """The same weight with one level of scales, float32."""
    return replace(
        w,
        scale=group_scales(w),
        super_scale=None,
        super_group=0,
        scale_table=None,
        scale_offset=None,
    )


def _decode_blocks(w: Blocks) -> Tensor:
    kind = BLOCK_TYPES.get(w.type)
    if kind is None:
        raise KernelError(f"block type: expected one of {sorted(BLOCK_TYPES)}, found {w.type!r}")
    blocks = w.data.reshape(-1, kind.nbytes)
    return _BLOCK_DECODERS[w.type](blocks).reshape(w.shape)


def _half(blocks: Tensor, offset: int) -> Tensor:
    """The little-endian float16 at byte ``offset`` of every block, as float32 ``[B, 1]``."""
    return blocks[:, offset : offset + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(quants: Tensor) -> Tensor:
    """Sixteen bytes -> codes ``[B, 32]``: the low nibbles, then the high ones."""
    return torch.cat((quants & 15, quants >> 4), dim=1)


def _fifth_bits(blocks: Tensor, offset: int) -> Tensor:
    """The bits of the word at byte ``offset`` as the fifth bits of 32 codes."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    word = blocks[:, offset : offset + 4].unsqueeze(2)
    return (((word >> shifts) & 1) << 4).reshape(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 2:]).to(torch.float32) - 8.0) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).to(torch.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (codes.to(torch.float32) - 16.0) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes.to(torch.float32) * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32) * _half(blocks, 0)


def _scales_and_mins(s: Tensor) -> tuple[Tensor, Tensor]:
    """q4_k, q5_k: uint8 ``[..., 12]`` -> eight 6-bit scales and eight 6-bit mins, ``[..., 8]``."""
    low, mid, high = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    mins = torch.cat((mid & 63, (high >> 4) | ((mid >> 6) << 4)), dim=-1)
    return scales, mins


def _signed_scales(s: Tensor) -> Tensor:
    """q3_k: uint8 ``[..., 12]`` -> sixteen 6-bit scales minus 32, int8 ``[..., 16]``."""
    low, high = s[..., 0:8], s[..., 8:12]
    low = torch.cat((low & 15, low >> 4), dim=-1)
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    return (low | (high << 4)).view(torch.int8) - 32


def _q2_k(blocks: Tensor) -> Tensor:
    scales = blocks[:, 0:16]
    scale = (_half(blocks, 80) * (scales & 15).to(torch.float32)).unsqueeze(2)
    minus = (_half(blocks, 82) * (scales >> 4).to(torch.float32)).unsqueeze(2)
    return scale * _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).to(torch.float32) - minus


def _q3_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).reshape(1, 8, 1)
    high = (blocks[:, 0:32].unsqueeze(1) >> shifts) & 1
    codes = _two_bits(blocks[:, 32:96]).reshape(-1, 8, 32) | (high << 2)
    scale = _half(blocks, 108) * _signed_scales(blocks[:, 96:108]).to(torch.float32)
    return scale.unsqueeze(2) * (codes.reshape(-1, 16, 16).to(torch.float32) - 4.0)


def _two_bits(quants: Tensor) -> Tensor:
    """``[B, 64]`` -> 256 codes: 32 bytes hold 128, their lowest bits the first 32."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=quants.device)
    return (quants.reshape(-1, 2, 1, 32) >> shifts.reshape(1, 1, 4, 1)) & 3


def _q45_k(blocks: Tensor, codes: Tensor) -> Tensor:
    """``d * sc * q - dmin * m`` with codes ``[B, 8, 32]``."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales.to(torch.float32)).unsqueeze(2)
    minus = (_half(blocks, 2) * mins.to(torch.float32)).unsqueeze(2)
    return scale * codes.to(torch.float32) - minus


def _q4_k(blocks: Tensor) -> Tensor:
    qs = blocks[:, 16:144].reshape(-1, 4, 32)
    codes = torch.stack((qs & 15, qs >> 4), dim=2).reshape(-1, 8, 32)
    return _q45_k(blocks, codes)


def _q5_k(blocks: Tensor) -> Tensor:
    qs = blocks[:, 48:176].reshape(-1, 4, 32)
    low = torch.stack((qs & 15, qs >> 4), dim=2).reshape(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).reshape(1, 8, 1)
    high = (blocks[:, 16:48].unsqueeze(1) >> shifts) & 1
    return _q45_k(blocks, low | (high << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)
    low = torch.cat((low & 15, low >> 4), dim=2)  # [B, 2, 4, 32]: l, l + 32, l + 64, l + 96
    high = _two_bits(blocks[:, 128:192])
    codes = (low | (high << 4)).to(torch.float32) - 32.0
    scales = blocks[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    scale = (_half(blocks, 208) * scales).reshape(-1, 16, 1)
    return scale * codes.reshape(-1, 16, 16)


def _table(kind: str, codes: Tensor) -> Tensor:
    """The table of a block type at ``codes``, float32."""
    table = torch.tensor(BLOCK_TYPES[kind].table, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int64)]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _table("iq4_nl", _nibbles(blocks[:, 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4].unsqueeze(2) >> shifts).reshape(-1, 8) & 3
    low = blocks[:, 4:8]
    low = torch.stack((low & 15, low >> 4), dim=2).reshape(-1, 8)
    scales = (low | (high << 4)).view(torch.int8) - 32  # 6 bits each
    scale = (_half(blocks, 0) * scales.to(torch.float32)).unsqueeze(2)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(-1, 8, 32)
    return scale * _table("iq4_xs", codes)


def _mxfp4(blocks: Tensor) -> Tensor:
    scale = blocks[:, :1].contiguous().view(torch.float8_e8m0fnu).to(torch.float32)
    return scale * _table("mxfp4", _nibbles(blocks[:, 1:]))


_BLOCK_DECODERS = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "q2_k": _q2_k,
    "q3_k": _q3_k,
    "q4_k": _q4_k,
    "q5_k": _q5_k,
    "q6_k": _q6_k,
    "iq4_nl": _iq4_nl,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}
