"""Scales of packed weights: 16 rows interleaved for the native kernels, and back."""

from __future__ import annotations

from sdk.kernels.cpu.library import ELEMENT_TYPES
from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.reference.decode import pack_codes, unpack_codes
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks

#: Rows of a tile and of a row block: kTileRows of native/abi.hpp.
TILE_ROWS = 16
#: Element types of native/abi.hpp that torch lacks: halves of a byte, and numbers of 16 rows in 2,
#: 4 and 6 bits.
LOW_4, HIGH_4, U2, U4, I6 = 7, 8, 11, 12, 13


def interleave(x: Tensor) -> Tensor:
    """``[N, G] -> [ceil(N / 16), G, 16]``, padded with zero rows."""
    if x.itemsize == 1:  # torch cannot pad every type of 8 bits
        return _interleave(x.view(torch.uint8)).view(x.dtype)
    return _interleave(x)


def _interleave(x: Tensor) -> Tensor:
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % TILE_ROWS))
    return x.view(-1, TILE_ROWS, x.shape[1]).transpose(1, 2).contiguous()


def deinterleave(x: Tensor, rows: int) -> Tensor:
    """The inverse of :func:`interleave`."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])[:rows].contiguous()


def turn(x: Tensor) -> Tensor:
    """``[R, K] -> [K, R]``, and back."""
    return x.t().contiguous()


def pack_zeros(w: Affine, zeros: Tensor, columns: bool) -> tuple[Tensor, int]:
    """Zero points with their element type: integers in 2, 4 or 8 bits (8 if every column has its
    own zero point), floats in their own type."""
    if zeros.is_floating_point():
        return (turn if columns else interleave)(zeros), ELEMENT_TYPES[type_name(zeros.dtype)]
    if columns:
        return turn(unpack_codes(zeros, w.bits, w.shape[1])), ELEMENT_TYPES["uint8"]
    rows = interleave(unpack_codes(zeros, w.bits, w.scale.shape[1]))
    width = _width(w.bits)
    parts = rows.view(*rows.shape[:2], 8 // width, -1)  # [., ., parts of a byte, bytes]
    packed = torch.zeros_like(parts[:, :, 0])
    for i in range(8 // width):
        packed |= parts[:, :, i] << width * i
    return packed, {2: U2, 4: U4, 8: ELEMENT_TYPES["uint8"]}[width]


def unpack_zeros(facts: Affine, zeros: Tensor) -> Tensor:
    """The inverse of :func:`pack_zeros`."""
    n = facts.shape[0]
    if zeros.is_floating_point():
        return deinterleave(zeros, n)
    return pack_codes(deinterleave(_lanes(zeros, _width(facts.bits)), n), facts.bits)


def _lanes(x: Tensor, width: int) -> Tensor:
    """The numbers of 16 rows from bytes that hold several: ``[., ., bytes] -> [., ., 16]``."""
    return torch.cat([x >> width * i & (1 << width) - 1 for i in range(8 // width)], dim=2)


def unpack_columns(facts: Affine, zeros: Tensor) -> Tensor:
    """The inverse of :func:`pack_zeros` if every column has its own zero point."""
    return turn(zeros) if zeros.is_floating_point() else pack_codes(turn(zeros), facts.bits)


def _width(bits: int) -> int:
    return 2 if bits <= 2 else 4 if bits <= 4 else 8


def _six_bits(scale: Tensor, rows: int) -> Tensor:
    """q3_k: ``[blocks, groups, 12]`` -> codes uint8 ``[rows, groups]``."""
    codes = _lanes(scale[:, :, :8], 4) | _lanes(scale[:, :, 8:], 2) << 4
    return deinterleave(codes, rows)


def unpack_block_scales(
    facts: Blocks,
    scale: Tensor,
    minus: Tensor | None,
    super_scale: Tensor | None,
    super_minus: Tensor | None,
) -> Tensor:
    """Rows of blocks with their scales; the bytes of the codes are zero."""
    n, k = facts.shape
    kind = BLOCK_TYPES[facts.type]
    blocks = torch.zeros(n, k // kind.elements, kind.nbytes, dtype=torch.uint8)
    if super_scale is None:
        one = deinterleave(scale, n).unsqueeze(2).view(torch.uint8)
        blocks[:, :, 0 : one.shape[2]] = one
        if minus is not None:  # the kernels subtract what the file adds
            minimum = deinterleave(minus, n).neg().unsqueeze(2)
            blocks[:, :, 2:4] = minimum.view(torch.uint8)
        return blocks.view(n, -1)
    groups = _six_bits(scale, n) if facts.type == "q3_k" else deinterleave(scale, n)
    scales = groups.view(n, k // kind.elements, -1)
    d = deinterleave(super_scale, n).unsqueeze(2).view(torch.uint8)
    if facts.type == "q6_k":
        blocks[:, :, 192:208] = scales
        blocks[:, :, 208:210] = d
        return blocks.view(n, -1)
    if facts.type == "q3_k":
        blocks[:, :, 96:104] = scales[:, :, :8] & 15 | scales[:, :, 8:] << 4
        for i in range(4):
            blocks[:, :, 104:108] |= scales[:, :, 4 * i : 4 * i + 4] >> 4 << 2 * i
        blocks[:, :, 108:110] = d
        return blocks.view(n, -1)
    if facts.type == "iq4_xs":
        six = (scales + 32).view(torch.uint8)
        blocks[:, :, 0:2] = d
        for i in range(4):
            blocks[:, :, 4 + i] = (six[:, :, 2 * i] & 15) | six[:, :, 2 * i + 1] << 4
            blocks[:, :, 2] |= six[:, :, i] >> 4 << 2 * i
            blocks[:, :, 3] |= six[:, :, 4 + i] >> 4 << 2 * i
        return blocks.view(n, -1)
    assert super_minus is not None
    d_min = deinterleave(super_minus, n).unsqueeze(2).view(torch.uint8)
    if facts.type == "q2_k":
        blocks[:, :, 0:16] = scales
        blocks[:, :, 80:84] = torch.cat((d, d_min), dim=2)
        return blocks.view(n, -1)
    assert minus is not None
    mins = deinterleave(minus, n).view(n, k // kind.elements, -1)
    blocks[:, :, 0:4] = torch.cat((d, d_min), dim=2)
    blocks[:, :, 4:8] = scales[:, :, :4] | (scales[:, :, 4:] >> 4 << 6)
    blocks[:, :, 8:12] = mins[:, :, :4] | (mins[:, :, 4:] >> 4 << 6)
    blocks[:, :, 12:16] = (scales[:, :, 4:] & 15) | (mins[:, :, 4:] << 4)
    return blocks.view(n, -1)
