"""How keys and values become codes in a page, and back: see ``kernels/kv/kv_types.py``.

8-bit codes are read and written as bytes, in integer arithmetic: cards before compute capability
8.9 have no instruction for e4m3, and AMD's gfx942 has another e4m3 in its own. Attention reads them
by the card's own instructions where it has them (``CONVERT``).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from sdk.kernels.gpu.pages import E4M3, FLOAT, INT4, INT8

#: The largest float16. Values that become codes or float16 saturate there.
HALF_MAX = tl.constexpr(65504.0)
#: The code of the largest value of a group.
_INT8_PEAK = tl.constexpr(127.0)
_FLOAT8_PEAK = tl.constexpr(448.0)
#: By which instructions 8-bit codes become float16: any card's, NVIDIA's on bytes, and those of
#: NVIDIA's cards from 8.9 on for e4m3 too.
PORTABLE, BYTES, FLOAT8 = (tl.constexpr(i) for i in range(3))
#: Four codes of a register, ``$2``, become float16 in ``$0`` and ``$1``. An integer becomes the low
#: bits of a float16 from 1024 on (a conversion of integers runs at a quarter of the speed): x + 128
#: those of x + 1152, a nibble (the upper one of bytes that are -1 in ``$3``, the lower one where
#: they are 0) those of itself + 1024. The bits of an e4m3 are those of a float16 2^8 times smaller,
#: those of an e5m2 the upper ones of a float16.
INT8_CODES = tl.constexpr("""{
    .reg .b32 a, b;
    mov.b32 b, 0x64806480;
    xor.b32 a, $2, 0x80808080;
    prmt.b32 $0, a, 0x64646464, 0x4140;
    prmt.b32 $1, a, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, b;
    sub.f16x2 $1, $1, b;
}""")
NIBBLES = tl.constexpr("""{
    .reg .b32 a, b;
    mov.b32 b, 0x64006400;
    shr.b32 a, $2, 4;
    xor.b32 a, a, $2;
    and.b32 a, a, $3;
    xor.b32 a, a, $2;
    and.b32 a, a, 0x0F0F0F0F;
    prmt.b32 $0, a, 0x64646464, 0x4140;
    prmt.b32 $1, a, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, b;
    sub.f16x2 $1, $1, b;
}""")
E4M3_CODES = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    mov.b32 d, 0x5C005C00;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.b32 c, a, 1;
    and.b32 c, c, 0x3F803F80;
    and.b32 a, a, 0x80008000;
    or.b32 $0, a, c;
    shr.b32 c, b, 1;
    and.b32 c, c, 0x3F803F80;
    and.b32 b, b, 0x80008000;
    or.b32 $1, b, c;
    mul.f16x2 $0, $0, d;
    mul.f16x2 $1, $1, d;
}""")
E5M2_CODES = tl.constexpr("""{
    .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    mov.b32 $0, a;
    mov.b32 $1, b;
}""")
#: Powers of two that bring the scales of values nearer to 1, for weights that are multiplied by
#: them and rounded to float16. A scale is at most 65504 / 127 of int8, 65504 / 448 of 8-bit floats
#: and 2 * 65504 / 15 of int4, so that none becomes infinite.
INT8_UNIT, FLOAT8_UNIT, INT4_UNIT = (tl.constexpr(x) for x in (64.0, 256.0, 4.0))
#: The bits of the largest and of the NaN scale of 4-bit codes.
_LARGEST, _NAN = tl.constexpr(0xF7), tl.constexpr(0xFF)


@triton.jit
def mixed(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``x [ROWS, WIDTH]`` times the Hadamard matrix of ``BLOCK`` along the last dimension.

    Sums in the order of ``reference/page_codes.py`` and so the same bits.
    """
    for i in tl.static_range(8):
        if (1 << i) < BLOCK:
            pairs = tl.reshape(x, (ROWS, WIDTH // (2 << i), 2, 1 << i))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.join(first + second, first - second)
            x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, WIDTH))
    return x * (1.0 / (BLOCK**0.5))


@triton.jit
def load_values(
    codes, scales, page, head, slot, seen, STRIDES: tl.constexpr, QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr, CONVERT: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The rows of ``slot [BLOCK_N]`` of ``page [BLOCK_N]``, as operands of a product.

    Codes are multiplied by their scale here only if it holds for a part of a head's dimensions,
    because it cannot leave the product. With one scale for a head (``GROUP`` 0) the caller
    multiplies what comes out of the product or goes into it by :func:`load_scales`. ``QUERIES``:
    rows of the product's other operand.
    """
    column = tl.arange(0, BLOCK_D)
    place = page * STRIDES[0] + head * STRIDES[1] + slot * STRIDES[2]
    byte = column % (HEAD_DIM // 2) if KIND == INT4 else column
    mask = (column < HEAD_DIM)[None, :]
    # Integer codes are finite; those of keys that are not seen meet a scale or a weight of 0.
    if KIND != INT8 and KIND != INT4:
        mask = mask & seen[:, None]
    x = tl.load(codes + place[:, None] + byte[None, :], mask=mask, other=0)
    if KIND == FLOAT:
        x = operand(x, DOT, WIDEN)
    else:
        at_scale = scales + page * STRIDES[3] + head * (GROUPS * STRIDES[4]) + slot
        if GROUP:
            parts: tl.constexpr = BLOCK_D // GROUP
            group = tl.arange(0, parts)
            known = seen[:, None] & (group < GROUPS)[None, :]
            step = tl.load(at_scale[:, None] + group[None, :] * STRIDES[4], mask=known, other=0)
            step = tl.broadcast_to(step[:, :, None], (BLOCK_N, parts, GROUP))
            step = tl.reshape(step, (BLOCK_N, BLOCK_D))
        else:
            step = tl.load(at_scale, mask=seen, other=0)[:, None]
        if KIND == INT4:
            x = _nibble(x, (column >= HEAD_DIM // 2)[None, :], CONVERT).to(DOT)
            x = x - ((step >> 8) & 255).to(DOT) * 0.0625
        else:
            x = _decoded(x, KIND, CONVERT).to(DOT)
        if GROUP:
            x = x * _size(step, KIND).to(DOT)
        if CONVERT and not WIDEN and x.dtype.primitive_bitwidth == 16:  # noqa: SIM102
            # 9.0 and 10.0 multiply 64 rows and more from shared memory
            if QUERIES < 64 or not cuda_capability_geq(9) or cuda_capability_geq(12):
                x = _kept(x)
    return x


@triton.jit
def _kept(x):
    """x, computed by the threads that loaded its codes.

    Otherwise Triton moves the layout that an operand has in registers up to the load, and codes are
    read from shared memory byte by byte. It moves nothing over an impure instruction.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@triton.jit
def load_scales(
    scales, page, head, slot, seen, STRIDES: tl.constexpr, KIND: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """The scales of whole heads, float32 ``[BLOCK_N]``; 0 where not ``seen``."""
    at_scale = scales + page * STRIDES[3] + head * (GROUPS * STRIDES[4]) + slot
    return _size(tl.load(at_scale, mask=seen, other=0), KIND).to(tl.float32)


@triton.jit
def _size(step, KIND: tl.constexpr):
    """The float16 scale in what is stored."""
    if KIND == INT4:
        step = ((step & 255) << 7).to(tl.float16, bitcast=True)
    return step


@triton.jit
def _nibble(x, upper, CONVERT: tl.constexpr):
    """The lower four bits of each byte, or the ``upper`` ones, as float16."""
    if CONVERT:
        x = tl.inline_asm_elementwise(
            NIBBLES,
            "=r,=r,r,r",
            [x, tl.where(upper, -1, 0).to(tl.int8)],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        x = ((x.to(tl.int16) >> tl.where(upper, 4, 0)) & 15).to(tl.float16)
    return x


@triton.jit
def _decoded(x, KIND: tl.constexpr, CONVERT: tl.constexpr):
    """8-bit codes as float16, exactly."""
    if KIND == E4M3 and CONVERT == FLOAT8:
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif CONVERT:
        CODES: tl.constexpr = (
            INT8_CODES if KIND == INT8 else E4M3_CODES if KIND == E4M3 else E5M2_CODES
        )
        x = tl.inline_asm_elementwise(CODES, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    elif KIND == INT8:
        x = x.to(tl.float16)
    elif KIND == E4M3:
        # The bits of an e4m3 are those of a float16 2^8 times smaller, subnormals included.
        wide = x.to(tl.uint16)
        x = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    else:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x


@triton.jit
def operand(x, DOT: tl.constexpr, WIDEN: tl.constexpr):
    """``x`` rounded to ``DOT``; ``WIDEN``: a bfloat16 as one, but held in float32."""
    if WIDEN and DOT == tl.bfloat16:
        x = round_bfloat16(x.to(tl.float32))
    else:
        x = x.to(DOT)
    return x


@triton.jit
def round_bfloat16(x):
    """Float32 values to the nearest that bfloat16 has, the even one of two."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(x != x, x, bits.to(tl.float32, bitcast=True))


@triton.jit
def round_even(x):
    """The nearest integer of each ``|x| <= 2^22``, the even one of two."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def clamped(x):
    """Within the range of float16; NaN stays."""
    return tl.where(x > HALF_MAX, HALF_MAX, tl.where(x < -HALF_MAX, -HALF_MAX, x))


@triton.jit
def encode(x, KIND: tl.constexpr):
    """Groups ``x [rows, groups, size]`` of float32 as codes, and their scales ``[rows, groups]``.

    The codes of int4 are 0 .. 15, in int32, its scales int16. A NaN makes its group's scale NaN and
    the codes 0, so that it stays visible.
    """
    broken = tl.max((x != x).to(tl.int32), axis=2) > 0
    x = tl.where(broken[:, :, None], 0.0, x)
    if KIND == INT4:
        codes, scales = _nibbles(x)
        scales = tl.where(broken, _NAN, scales).to(tl.int16)
        codes = tl.where(broken[:, :, None], 0, codes)
    else:
        most: tl.constexpr = _INT8_PEAK if KIND == INT8 else _FLOAT8_PEAK
        step = tl.minimum(tl.div_rn(tl.max(tl.abs(x), axis=2), most), HALF_MAX).to(tl.float16)
        wide = step.to(tl.float32)
        inverse = tl.where(wide > 0.0, tl.div_rn(1.0, wide), 0.0)
        x = tl.minimum(tl.maximum(x * inverse[:, :, None], -most), most)
        scales = tl.where(broken, float("nan"), wide).to(tl.float16)
        if KIND == INT8:
            codes = round_even(x).to(tl.int8)
        elif KIND == E4M3:
            codes = float8_bits(x, 3, 7).to(tl.uint8)
        else:
            codes = float8_bits(x, 2, 15).to(tl.uint8)
    return codes, scales


@triton.jit
def float8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The byte of the nearest 8-bit float (ties to even) of each x within its range, int32."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.abs(x)
    bits = bits & 0x7FFFFFFF
    # Below the least normal number the codes are multiples of one step.
    small = round_even(size * (1 << (BIAS + MANTISSA - 1))).to(tl.int32)
    drop: tl.constexpr = 23 - MANTISSA
    rounded = bits + ((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    normal = (rounded >> drop) - ((127 - BIAS) << MANTISSA)
    return sign | tl.where(size < 2.0 ** (1 - BIAS), small, normal)


@triton.jit
def _nibbles(x):
    """Codes 0 .. 15, and scale and zero in one number: the middle of the range is code 7.5."""
    low = tl.minimum(tl.min(x, axis=2), 0.0)
    high = tl.maximum(tl.max(x, axis=2), 0.0)
    half = tl.minimum(tl.div_rn(high - low, 15.0), HALF_MAX).to(tl.float16)
    exact = half.to(tl.int16, bitcast=True).to(tl.int32)
    bits = tl.minimum((exact + 63 + ((exact >> 7) & 1)) >> 7, _LARGEST)
    scale = (bits << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)
    middle = (high + low) * 0.5 * inverse
    zero = tl.minimum(tl.maximum(round_even((7.5 - middle) * 16.0), 0.0), 255.0)
    codes = round_even(x * inverse[:, :, None] + (zero * 0.0625)[:, :, None])
    codes = tl.minimum(tl.maximum(codes, 0.0), 15.0).to(tl.int32)
    return codes, (zero.to(tl.int32) << 8) | bits


#: For latent pages, whose scales are multiplied there.
decoded = _decoded
