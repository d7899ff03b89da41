"""Products of 8-bit activations with 8-bit weights: ``y = (x_scale x) @ (w_scale w).T``.

Both operands are integers, multiplied and added exactly, or e4m3 floats, multiplied exactly and
added in float32. The scales, one per token and one per output row, are applied at the end.

The matrix units take 32 bytes along K at a time, two slices of ``packing.py``, which are extracted
byte by byte from words and therefore interleaved. ``round_rows`` writes the activations in that
order: column ``32 b + 16 s + i`` to ``32 b + 2 i + s``.

Must match ``reference/fake_quantize.py`` bit for bit in the codes and ``reference/linear.py`` to
1e-5 of the result's norm in the product.
"""

import triton
import triton.language as tl

from sdk.kernels.gpu.expert_tiles import expert_tile, moved, moved_words
from sdk.kernels.gpu.shares import store_tile, tile_rows


@triton.jit
def round_to(x, step):
    """x as the nearest multiple of ``step``, a power of two, to even if in doubt.

    A sum with ``1.5 * 2^23`` steps has no bits left for less than one.
    """
    large = step * 12582912.0
    return x + large - large


@triton.jit
def to_e4m3(x):
    """The nearest e4m3 float, which ends at 448; the interpreter's own conversion is not that."""
    size = tl.minimum(tl.abs(x), 448.0)
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    size = round_to(size, tl.maximum(power, 2.0**-6) * 0.125)
    # 2^-120 is the difference of the exponents' biases: what is left are the bits of an e4m3
    code = (size * 2.0**-120).to(tl.int32, bitcast=True) >> 20
    code = code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)
    return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def round_rows(
    x, codes, scales, K, padded, x_stride, static, limit,
    FLOAT: tl.constexpr, STATIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row m of x as codes ``[M, padded]`` and ``scales [M]``; ``STATIC``: the scale is given.

    ``limit`` bounds the magnitudes a scale is made of. A row that is not finite has the scale NaN.
    """
    m = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    poison = tl.zeros((BLOCK,), tl.float32)  # 0, or NaN where something is not finite
    for start in range(0, K, BLOCK):
        column = start + lane
        part = tl.load(x + m * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(part))
        poison += part * 0.0
    peak = tl.minimum(tl.max(most, 0), limit)
    scale = static if STATIC else tl.div_rn(peak, 448.0 if FLOAT else 127.5)
    tl.store(scales + m, scale + tl.sum(poison, 0))
    for start in range(0, padded, BLOCK):
        column = start + lane
        part = tl.load(x + m * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
        quotient = tl.div_rn(part, scale)
        if not STATIC:
            quotient = tl.where(peak > 1e-30, quotient, 0.0)
        if FLOAT:
            code = to_e4m3(quotient)
        else:
            code = round_to(tl.clamp(quotient, -128.0, 127.0), 1.0).to(tl.int8)
        place = column - column % 32 + column % 16 * 2 + column % 32 // 16
        tl.store(codes + m * padded + place, code, mask=column < padded)


@triton.jit(do_not_specialize=["M", "share", "split"])
def product_bytes(
    x, x_scale, out, parts, counters, w0, scale, offsets, starts, active, sources,
    M, N, units, share, split, experts, out_stride, part_stride, scale_rows,
    FLOAT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ROUTED: tl.constexpr,
    SHARED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [M, N]``: ``share`` units of 64 columns; the rest as in ``product.py``."""
    block = tl.program_id(1)
    rows, there = tile_rows(block, N, BLOCK_N, ACTIVATION, 0)
    first = tl.program_id(0) * BLOCK_M
    end = M
    if ROUTED:
        expert, first, end = expert_tile(starts, active, experts, tl.program_id(0), BLOCK_M)
        if first >= end:
            return
        w0 = moved_words(w0, offsets, expert, 0)
        scale = moved(scale, offsets, expert, 3)
    m = first + tl.arange(0, BLOCK_M)
    tokens = tl.minimum(m, end - 1)
    if sources is not None:
        tokens = tl.load(sources + tokens)
    lane = tl.arange(0, 16)
    depth = tl.arange(0, 32)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32 if FLOAT else tl.int32)
    begin = tl.program_id(2) * share
    where_x = x + tokens.to(tl.int64)[None, :] * (units * 64) + depth[:, None]
    where_w = w0 + ((rows // 16) * units * 256 + (rows % 16) * 16)[:, None] + lane[None, :]
    for unit in range(begin, tl.minimum(begin + share, units)):
        words = tl.load(where_w + unit * 256)
        for half in tl.static_range(2):
            low = words >> (16 * half)
            high = words >> (16 * half + 8)
            pair = tl.reshape(tl.join(low, high), (BLOCK_N, 32)) & 255
            if FLOAT:
                w = pair.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            else:
                w = (pair ^ 128).to(tl.int8)  # packed with 128 added
            xs = tl.load(where_x + unit * 64 + half * 32)
            acc = tl.dot(w, xs, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
    s = tl.load(scale + rows // scale_rows).to(tl.float32)
    y = acc.to(tl.float32) * s[:, None] * tl.load(x_scale + tokens)[None, :]
    store_tile(
        y, block, rows, there, m, m < end, out, out_stride, parts, part_stride, counters,
        block * tl.num_programs(0) + tl.program_id(0), tl.program_id(2), split, N,
        SHARED, ACTIVATION, BLOCK_N, BLOCK_M,
    )  # fmt: skip
