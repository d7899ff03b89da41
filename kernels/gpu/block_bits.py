"""The bit positions of codes, scales and minima in GGUF blocks.

Bit ``8 b + i`` of a block is bit i (lowest first) of its byte b. A field of w bits is a list of w
bit numbers, lowest first, so one gather extracts any field of any block, and one scatter puts it
back: the two are inverse by construction. Source: the block structs in ggml-common.h. Tests compare
the values with ``kernels/reference/decode.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Bits = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one block type; ``zero`` is subtracted from a code, ``bias`` from a scale.

    ``negated``: the file adds the minimum, kernels subtract it.
    """

    codes: Bits
    scale: Bits
    scale_type: torch.dtype
    zero: int = 0
    bias: int = 0
    minus: Bits = ()
    negated: bool = False
    super_scale: Bits = ()
    super_minus: Bits = ()


def _field(byte: int, width: int, shift: int = 0) -> tuple[int, ...]:
    """``width`` bits from bit ``shift`` of byte ``byte`` on."""
    return tuple(range(8 * byte + shift, 8 * byte + shift + width))


def _each(count: int, field: Callable[[int], tuple[int, ...]]) -> Bits:
    return tuple(field(i) for i in range(count))


def _nibble(first: int) -> Callable[[int], tuple[int, ...]]:
    """Code k of blocks of 32: the low nibbles of 16 bytes, then the high ones."""
    return lambda k: _field(first + k % 16, 4, 4 * (k // 16))


def _pairs(first: int, k: int) -> tuple[int, ...]:
    """Code k of q4_k and q5_k: for every 32 bytes the low nibbles, then the high ones."""
    return _field(first + k // 64 * 32 + k % 32, 4, 4 * (k // 32 % 2))


def _crumb(first: int, k: int) -> tuple[int, ...]:
    """Two bits of code k: 32 bytes hold 128 codes, their lowest bits the first 32."""
    return _field(first + k // 128 * 32 + k % 32, 2, 2 * (k // 32 % 4))


def _six(group: int) -> tuple[int, ...]:
    """q4_k, q5_k: the 6-bit scale of a group; its minimum is four bytes further."""
    if group < 4:
        return _field(4 + group, 6)
    return _field(8 + group, 4) + _field(group, 2, 6)


def _six_minimum(group: int) -> tuple[int, ...]:
    if group < 4:
        return _field(8 + group, 6)
    return _field(8 + group, 4, 4) + _field(4 + group, 2, 6)


def _signed_six(group: int) -> tuple[int, ...]:
    """q3_k: the scale of a group, before subtracting 32."""
    return _field(96 + group % 8, 4, 4 * (group // 8)) + _field(104 + group % 4, 2, group // 4 * 2)


_HALF = (_field(0, 16),)
_HALF_2 = (_field(2, 16),)


def _k45(codes: Bits) -> Fields:
    """q4_k and q5_k, which differ only in their codes."""
    return Fields(
        codes,
        _each(8, _six),
        torch.uint8,
        minus=_each(8, _six_minimum),
        super_scale=_HALF,
        super_minus=_HALF_2,
    )


FIELDS = {
    "q4_0": Fields(_each(32, _nibble(2)), _HALF, torch.float16, 8),
    "q4_1": Fields(_each(32, _nibble(4)), _HALF, torch.float16, minus=_HALF_2, negated=True),
    "q5_0": Fields(
        _each(32, lambda k: _nibble(6)(k) + _field(2 + k // 8, 1, k % 8)), _HALF, torch.float16, 16
    ),
    "q5_1": Fields(
        _each(32, lambda k: _nibble(8)(k) + _field(4 + k // 8, 1, k % 8)),
        _HALF,
        torch.float16,
        minus=_HALF_2,
        negated=True,
    ),
    "q8_0": Fields(_each(32, lambda k: _field(2 + k, 8)), _HALF, torch.float16, 128),
    "q2_k": Fields(
        _each(256, lambda k: _crumb(16, k)),
        _each(16, lambda g: _field(g, 8)),  # scale below, minimum above
        torch.uint8,
        super_scale=(_field(80, 16),),
        super_minus=(_field(82, 16),),
    ),
    "q3_k": Fields(
        _each(256, lambda k: _crumb(32, k) + _field(k % 32, 1, k // 32)),
        _each(16, _signed_six),
        torch.int8,
        4,
        32,
        super_scale=(_field(108, 16),),
    ),
    "q4_k": _k45(_each(256, lambda k: _pairs(16, k))),
    "q5_k": _k45(_each(256, lambda k: _pairs(48, k) + _field(16 + k % 32, 1, k // 32))),
    "q6_k": Fields(
        _each(
            256,
            lambda k: _field(k // 128 * 64 + k % 64, 4, 4 * (k // 64 % 2)) + _crumb(128, k),
        ),
        _each(16, lambda g: _field(192 + g, 8)),
        torch.int8,
        32,
        super_scale=(_field(208, 16),),
    ),
    "iq4_nl": Fields(_each(32, _nibble(2)), _HALF, torch.float16),
    "iq4_xs": Fields(
        _each(256, lambda k: _field(8 + k // 32 * 16 + k % 16, 4, 4 * (k // 16 % 2))),
        _each(8, lambda g: _field(4 + g // 2, 4, g % 2 * 4) + _field(2 + g // 4, 2, g % 4 * 2)),
        torch.int8,
        0,
        32,
        super_scale=_HALF,
    ),
    "mxfp4": Fields(_each(32, _nibble(1)), (_field(0, 8),), torch.float8_e8m0fnu),
}


def take(blocks: Tensor, fields: Bits) -> Tensor:
    """Fields of up to 8 bits of ``blocks`` uint8 ``[B, nbytes]``: uint8 ``[B, len(fields)]``."""
    width = max(len(field) for field in fields)
    bits = torch.tensor(fields, device=blocks.device)
    found = (blocks[:, bits // 8] >> (bits % 8).to(torch.uint8)) & 1
    weights = 1 << torch.arange(width, dtype=torch.uint8, device=blocks.device)
    return (found * weights).sum(2, dtype=torch.uint8)


def put(blocks: Tensor, fields: Bits, values: Tensor) -> None:
    """The inverse of :func:`take`: sets the fields, whose bits must be zero."""
    for i, field in enumerate(fields):
        for j, bit in enumerate(field):
            blocks[:, bit // 8] |= (values[:, i] >> j & 1) << bit % 8


def take_typed(blocks: Tensor, fields: Bits, dtype: torch.dtype, bias: int = 0) -> Tensor:
    """Scales in their own type: bytes (minus ``bias``), or 16-bit floats."""
    if dtype.itemsize == 2:
        first = fields[0][0] // 8
        return blocks[:, first : first + 2].contiguous().view(dtype)
    codes = take(blocks, fields)
    return (codes.view(dtype) - bias) if bias else codes.view(dtype)


def put_typed(blocks: Tensor, fields: Bits, values: Tensor, bias: int = 0) -> None:
    """The inverse of :func:`take_typed`."""
    if values.itemsize == 2:
        first = fields[0][0] // 8
        blocks[:, first : first + 2] = values.flatten().unsqueeze(1).view(torch.uint8)
    else:
        put(blocks, fields, ((values + bias) if bias else values).contiguous().view(torch.uint8))
