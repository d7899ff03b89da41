"""Products of 8-bit activations with 8-bit weights: ``y = (x_scale x) @ (w_scale w).T``.

Both operands are integers, multiplied and added exactly, or e4m3 floats, multiplied exactly. The
scales, one per token and one per output row, are applied to sums; ``GROUPED`` ones, per ``STEP`` of
columns and per block of rows, to the sum of a step.

Sums of e4m3 products: the matrix units of Ada and Hopper (8.9, 9.0) keep 13 bits of a sum's
mantissa and cut off the rest. The error grows with K, to 0.3 % of the result for K = 14,336 and to
2 % if values have a mean. There (``PROMOTE``) each ``STEP`` of columns is a sum of its own, scaled
and added to the others in float32 registers, known as promotion or two-level accumulation. Sources:
DeepSeek-V3 (2024), section 3.3.2; SageAttention2 (2024).

Must match ``reference/fake_quantize.py`` bit for bit in the codes, and in the product
``reference/linear.py`` to, of the result's norm:

- integers: 1e-6, in any order of additions;
- e4m3, where sums are float32 (the interpreter) or have 25 bits (10.0): 1e-5;
- e4m3 with ``PROMOTE`` on 8.9 and 9.0: 5e-4, whatever K (2.5e-4 in tests/gpu/short_sums.py, a
  model of the matrix units; no card has been measured).
"""

import triton
import triton.language as tl

from sdk.kernels.gpu import byte_rows
from sdk.kernels.gpu.expert_tiles import expert_tile, moved, moved_words
from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.shares import store_tile

# Columns of a step, and of a promoted sum.
STEP = tl.constexpr(byte_rows.STEP)


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
def scale_of_row(
    peak, static, limit, FLOAT: tl.constexpr, STATIC: tl.constexpr, POWER: tl.constexpr
):
    """The largest magnitude that is considered, and the scale, which is given (``STATIC``) or maps
    it to the end of the codes; ``POWER``: rounded up to a power of two."""
    peak = tl.minimum(peak, limit)
    if STATIC:
        scale = static
    else:
        scale = tl.div_rn(peak, 448.0 if FLOAT else 127.5)
        if POWER:
            bits = scale.to(tl.int32, bitcast=True) + 0x7FFFFF
            scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    return peak, scale


@triton.jit
def codes_of_row(part, peak, scale, FLOAT: tl.constexpr, STATIC: tl.constexpr):
    """Columns of a row, float32, as codes with the scale of :func:`scale_of_row`."""
    quotient = tl.div_rn(part, scale)
    if not STATIC:
        quotient = tl.where(peak > 1e-30, quotient, 0.0)
    if FLOAT:
        code = to_e4m3(quotient)
    else:
        code = round_to(tl.clamp(quotient, -128.0, 127.0), 1.0).to(tl.int8)
    return code


@triton.jit
def round_rows(
    x, codes, scales, K, padded, x_stride, static, limit,
    FLOAT: tl.constexpr, STATIC: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row m of x as codes ``[M, padded]`` and ``scales [M]``; ``STATIC``: the scale is given.

    ``limit`` bounds the magnitudes a scale is made of. A row that is not finite has the scale NaN.
    """
    after_earlier()
    m = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    poison = tl.zeros((BLOCK,), tl.float32)  # 0, or NaN where something is not finite
    for start in range(0, K, BLOCK):
        column = start + lane
        part = tl.load(x + m * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(part))
        poison += part * 0.0
    peak, scale = scale_of_row(tl.max(most, 0), static, limit, FLOAT, STATIC, POWER)
    tl.store(scales + m, scale + tl.sum(poison, 0))
    for start in range(0, padded, BLOCK):
        column = start + lane
        part = tl.load(x + m * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
        code = codes_of_row(part, peak, scale, FLOAT, STATIC)
        tl.store(codes + m * padded + column, code, mask=column < padded)


@triton.jit(do_not_specialize=["M"])
def round_groups(
    x, codes, scales, M, K, padded, x_stride, limit,
    FLOAT: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`round_rows` with a scale for each ``STEP`` of columns: ``scales [groups, M]``.

    Program (m, i) has groups ``BLOCK i`` and on.
    """
    after_earlier()
    m = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = group[:, None] * STEP + tl.arange(0, STEP)[None, :]
    part = tl.load(x + m * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
    peak, scale = scale_of_row(tl.max(tl.abs(part), 1), 0.0, limit, FLOAT, False, POWER)
    code = codes_of_row(part, peak[:, None], scale[:, None], FLOAT, False)
    tl.store(codes + m * padded + column, code, mask=column < padded)
    poison = tl.sum(part * 0.0, 1)
    tl.store(scales + group * M + m, scale + poison, mask=group * STEP < padded)


@triton.jit
def columns_of(rows, K):
    """Where the first ``STEP`` columns of rows of a matrix with K columns are."""
    return rows.to(tl.int64)[:, None] * K + tl.arange(0, STEP)[None, :]


@triton.jit
def add_step(acc, w, x, factor, FLOAT: tl.constexpr, PROMOTE: tl.constexpr, TURNED: tl.constexpr):
    """acc and the products of w ``[rows, STEP]`` with x ``[tokens, STEP]``; factor ``[tokens]``."""
    if TURNED:
        left, right, factor = x, tl.trans(w), factor[:, None]
    else:
        left, right, factor = w, tl.trans(x), factor[None, :]
    if PROMOTE:
        # without a factor Triton folds the addition into the matrix instruction (8.9)
        acc += tl.dot(left, right, out_dtype=tl.float32) * factor
    else:
        acc = tl.dot(left, right, acc, out_dtype=tl.float32 if FLOAT else tl.int32)
    return acc


@triton.jit
def scaled_sums(acc, scale, scale_rows, factor, n, N, GROUPED: tl.constexpr, TURNED: tl.constexpr):
    """Sums times the scales of rows n (unless ``GROUPED``) and a factor per token, float32 ``[rows,
    tokens]``."""
    y = acc.to(tl.float32)
    if TURNED:
        y = tl.trans(y)
    if not GROUPED:
        y *= tl.load(scale + tl.minimum(n, N - 1) // scale_rows).to(tl.float32)[:, None]
    return y * factor[None, :]


@triton.jit(do_not_specialize=["M", "share", "split", "tiles_at"])
def product_bytes(
    x, x_scale, out, parts, counters, w, scale, offsets, starts, tiles, sources,
    M, N, K, share, split, tiles_at, out_stride, part_stride, scale_rows, scale_stride,
    FLOAT: tl.constexpr, PROMOTE: tl.constexpr, GROUPED: tl.constexpr, TWICE: tl.constexpr,
    TURNED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ROUTED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [M, N]``: ``share`` steps of K of x ``[M, K]`` and w ``[N, K]``.

    ``TWICE``: two tiles, of neighbouring rows, for which x is loaded once; one promoted sum at a
    time leaves registers for both. ``TURNED``: tokens are the left operand. A promoted sum is
    multiplied with a factor per token, of which a thread has two for 16 on the left, but a quarter
    of all on the right; few tokens go there, so that they fill the matrix instruction. Neighbouring
    programs have the same weights and other tokens: weights are read from memory once and x from
    the second-level cache. ``ROUTED`` as in ``product.py``.
    """
    after_earlier()
    first = tl.program_id(0) * BLOCK_M
    end = M
    if ROUTED:
        expert, first, end = expert_tile(starts, tiles, tiles_at, tl.program_id(0))
        if first >= end:
            return
        w = moved_words(w, offsets, expert, 0)
        scale = moved(scale, offsets, expert, 3)
    m = first + tl.arange(0, BLOCK_M)
    tokens = tl.minimum(m, end - 1)
    if sources is not None:
        tokens = tl.load(sources + tokens)
    block = tl.program_id(1) * (BLOCK_N * (2 if TWICE else 1))
    n = block + tl.arange(0, BLOCK_N)
    where_x = x + columns_of(tokens, K)
    where_w = w + columns_of(tl.minimum(n, N - 1), K)
    where_w2 = w + columns_of(tl.minimum(n + BLOCK_N, N - 1), K)
    factor = tl.load(x_scale + tokens)
    if TURNED:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if FLOAT else tl.int32)
    else:
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32 if FLOAT else tl.int32)
    acc2 = acc
    k = tl.arange(0, STEP)
    begin = tl.program_id(2) * share
    for step in range(begin, tl.minimum(begin + share, tl.cdiv(K, STEP))):
        column = step * STEP
        inside = (k < K - column)[None, :]
        of_step = factor
        if GROUPED:  # BLOCK_N divides scale_rows: one scale for all rows of the tile
            of_rows = tl.load(scale + step * scale_stride + block // scale_rows).to(tl.float32)
            of_step = tl.load(x_scale + step * M + tokens) * of_rows
        xs = tl.load(where_x + column, mask=inside, other=0.0 if FLOAT else 0)
        ws = tl.load(where_w + column, mask=inside, other=0.0 if FLOAT else 0)
        acc = add_step(acc, ws, xs, of_step, FLOAT, PROMOTE, TURNED)
        if TWICE:
            ws = tl.load(where_w2 + column, mask=inside, other=0.0 if FLOAT else 0)
            acc2 = add_step(acc2, ws, xs, of_step, FLOAT, PROMOTE, TURNED)
    if PROMOTE:  # every step had it
        factor = tl.full((BLOCK_M,), 1.0, tl.float32)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    store_tile(
        scaled_sums(acc, scale, scale_rows, factor, n, N, GROUPED, TURNED), 0, n, n < N,
        m, m < end, out, out_stride, parts, part_stride, counters, tile, tl.program_id(2), split, N,
        SHARED, "", BLOCK_N, BLOCK_M,
    )  # fmt: skip
    if TWICE:
        n += BLOCK_N
        tile += tl.num_programs(0) * tl.num_programs(1)
        store_tile(
            scaled_sums(acc2, scale, scale_rows, factor, n, N, GROUPED, TURNED), 0, n, n < N,
            m, m < end, out, out_stride, parts, part_stride, counters, tile, tl.program_id(2),
            split, N, SHARED, "", BLOCK_N, BLOCK_M,
        )  # fmt: skip
