"""Products of several tokens with packed weights, dequantized on the fly: ``y = x @ w.T``.

``w[n, k] = scale[n, g] * (value(code[n, k]) - zero[n, g]) - minus[n, g]`` with g the group of k, in
the order of ``packing.py``. A code becomes an exact small integer, table entry or short float; the
matrix units multiply those, and a group's sum is scaled in float32 afterwards, so only x and table
entries are rounded. The minimum costs one more sum of x per group.

The weights are the left operand (``[rows, 32] x [32, tokens]``), so that few tokens still fill the
matrix instruction. ``split`` programs may share K: see ``shares.py``.

Experts (``ROUTED``): rows of x are sorted by expert, and an expert's weights are ``offsets`` away
from those of the first; ``expert_tile`` finds the rows of a program. The grid depends only on the
number of rows, so that a captured step stays valid however they are routed.

Arguments that change with the number of tokens are not specialized: nothing is compiled while
serving.

Must match ``reference/linear.py``: bit for bit in ``decode_rows``, 2e-3 (float16 operands), 1e-5
(float32) of the result's norm in the products.
"""

import triton
import triton.language as tl

from sdk.kernels.gpu.expert_tiles import expert_tile, moved, moved_words
from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.shares import store_tile, tile_rows
from sdk.kernels.gpu.values import (
    all_codes,
    decode_values,
    load_minus,
    load_planes,
    load_scale,
    load_zero,
)


@triton.jit
def scaled(
    acc, part, total, zero, scale, super_scale, nested, offset, minus, super_minus, n, N, K, k,
    scale_stride, scale_rows,
    GROUP: tl.constexpr, SUPER: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr,
    MINUS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """``acc + part * scale - (minus + zero * scale) * total``, the latter if ``ZERO``.

    part is ``[rows, m]``, total, the sum of x, ``[m]``, zero ``[rows, 1]`` or a number.
    """
    s = load_scale(
        scale, super_scale, nested, offset, n, N, K, k, scale_stride, scale_rows,
        GROUP, SUPER, SCALE,
    )  # fmt: skip
    s = s[:, None]
    acc += part * (s * FACTOR)
    if ZERO:
        acc -= (zero * s) * total[None, :]
    if MINUS != "":
        f = load_minus(minus, super_minus, n, N, k, GROUP, SUPER, MINUS)
        acc -= f[:, None] * total[None, :]
    return acc


@triton.jit
def of_expert(
    w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus, offsets, expert
):  # fmt: skip
    """Where the parts of an expert's weight lie: ``PARTS`` of ``expert_tiles.py``, in order."""
    return (
        moved_words(w0, offsets, expert, 0), moved_words(w1, offsets, expert, 1),
        moved_words(w2, offsets, expert, 2), moved(scale, offsets, expert, 3),
        moved(super_scale, offsets, expert, 4), moved(nested, offsets, expert, 5),
        moved(offset, offsets, expert, 6), moved(zeros, offsets, expert, 7),
        moved(minus, offsets, expert, 8), moved(super_minus, offsets, expert, 9),
    )  # fmt: skip


@triton.jit
def sums_of_tile(
    tokens, sums, source, real, rows, loaded, w0, w1, w2, scale, super_scale, nested, offset, zeros,
    minus, super_minus, table, M, N, K, units, share, scale_stride, scale_rows,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr,
    MINUS: tl.constexpr, NANS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    DOT: tl.constexpr, MATH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    PAIRS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N, BLOCK_M]`` of :func:`product`: weights ``rows`` with the columns of x that
    ``tokens [2 PAIRS, BLOCK_M]`` points to, rows ``source`` of x, where ``real``.

    ``loaded``: the rows in the order in which their words are loaded (``values.woven``).
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    part = acc
    total = tl.zeros((BLOCK_M,), tl.float32)  # stays so without minima
    SLICE: tl.constexpr = 2 * PAIRS
    BITS: tl.constexpr = WIDTH + WIDTH_1 + WIDTH_2
    nothing = tl.minimum(units, 0)
    first = tl.program_id(2) * share
    for unit in range(first, tl.minimum(first + share, units)):
        words = load_planes(w0, w1, w2, loaded, unit, units, WIDTH, WIDTH_1, WIDTH_2, UNIT, PAIRS)
        for c in tl.static_range(UNIT // CHUNK):
            k = unit * UNIT + c * CHUNK
            at = tl.minimum(k, K - 1)  # columns of padding may belong to no group
            z = load_zero(zeros, rows if ZEROS == 32 else loaded, N, at, GROUP, ZEROS, ZERO)
            if not WHOLE:
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for j in tl.static_range(CHUNK // SLICE):
                at_slice = c * (CHUNK // SLICE) + j
                codes = all_codes(words, at_slice, UNIT, WIDTH, WIDTH_1, WIDTH_2, PAIRS)
                whole = tl.full((1, 1), 0.0, tl.float32) if ZEROS == 32 else z
                w = decode_values(
                    codes, whole, table, nothing, KIND, BITS, NANS, PAIRS, WARPS, MATH
                )
                column = k + j * SLICE
                wanted = real[None, :] & (EVEN | (tl.arange(0, SLICE) < K - column)[:, None])
                xs = tl.load(tokens + column, mask=wanted, other=0.0).to(DOT)
                part = tl.dot(w, xs.to(MATH), part, input_precision="ieee")
            if not WHOLE:
                if MINUS != "" or ZEROS == 32:
                    total = tl.load(sums + (at // CHUNK) * M + tl.minimum(source, M - 1))
                    if not EVEN:  # a chunk of padding has no sum: at is in the one before
                        total = tl.where(k < K, total, 0.0)
                acc = scaled(
                    acc, part, total, z, scale, super_scale, nested, offset, minus, super_minus,
                    rows, N, K, at, scale_stride, scale_rows,
                    GROUP, SUPER, SCALE, FACTOR, MINUS, ZEROS == 32,
                )  # fmt: skip
    if WHOLE:
        z = load_zero(zeros, rows, N, 0, GROUP, ZEROS, ZERO)
        if MINUS != "" or ZEROS == 32:
            total = tl.load(sums + tl.program_id(2) * M + tl.minimum(source, M - 1))
        acc = scaled(
            acc, part, total, z, scale, super_scale, nested, offset, minus, super_minus,
            rows, N, K, 0, scale_stride, scale_rows,
            GROUP, SUPER, SCALE, FACTOR, MINUS, ZEROS == 32,
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["M", "share", "split", "tiles_at"])
def product(
    x, sums, out, parts, counters, w0, w1, w2, scale, super_scale, nested, offset, zeros, minus,
    super_minus, table, offsets, starts, tiles, sources, M, N, K, units, share, split, tiles_at,
    x_stride, out_stride, part_stride, scale_stride, scale_rows,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr,
    MINUS: tl.constexpr, NANS: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ROUTED: tl.constexpr, SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [M, N]``, ``share`` units of K: BLOCK_N rows and BLOCK_M tokens.

    Grid (tiles of tokens, tiles of rows, split): programs that run together share weights, so that
    those are read from memory once.

    ``CHUNK`` columns have one scale, with ``WHOLE`` all of a row; ``sums`` of x: ``add_chunks``.
    ``WIDEN``: float32 in place of ``DOT``, whose bfloat16 the interpreter multiplies wrongly.
    ``ROUTED``: x has M rows, of which ``sources[m]`` (where given) is row m's.
    """
    after_earlier()
    block = tl.program_id(1)
    n, there = tile_rows(block, N, BLOCK_N, ACTIVATION, 0)
    loaded, _ = tile_rows(block, N, BLOCK_N, ACTIVATION, WARPS)
    first = tl.program_id(0) * BLOCK_M
    end = M
    if ROUTED:
        expert, first, end = expert_tile(starts, tiles, tiles_at, tl.program_id(0))
        if first >= end:
            return
        w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus = of_expert(
            w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus,
            offsets, expert,
        )  # fmt: skip
    m = first + tl.arange(0, BLOCK_M)
    real = m < end
    source = m
    if sources is not None:
        source = tl.load(sources + m, mask=real, other=0)
    tokens = x + tl.arange(0, 2 * PAIRS)[:, None] + source.to(tl.int64)[None, :] * x_stride
    acc = sums_of_tile(
        tokens, sums, source, real, n, loaded, w0, w1, w2, scale, super_scale, nested,
        offset, zeros, minus, super_minus, table, M, N, K, units, share, scale_stride, scale_rows,
        KIND, WIDTH, WIDTH_1, WIDTH_2, UNIT, CHUNK, GROUP, SUPER, SCALE, FACTOR, ZEROS, ZERO,
        MINUS, NANS, WHOLE, EVEN, DOT, tl.float32 if WIDEN else DOT, BLOCK_N, BLOCK_M, PAIRS, WARPS,
    )  # fmt: skip
    store_tile(
        acc, block, n, there, m, real, out, out_stride, parts, part_stride, counters,
        block * tl.num_programs(0) + tl.program_id(0), tl.program_id(2), split, N,
        SHARED, ACTIVATION, BLOCK_N, BLOCK_M,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def add_chunks(
    x, sums, M, K, x_stride, CHUNK: tl.constexpr, DOT: tl.constexpr, BLOCK: tl.constexpr
):
    """``sums[c, m]``: the sum of x[m], rounded to ``DOT``, over columns ``CHUNK c`` and on.

    Grid (rows, chunks): of experts there may be more rows than the 65,535 of other dimensions.
    """
    after_earlier()
    m = tl.program_id(0)
    chunk = tl.program_id(1)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        inside = start + tl.arange(0, BLOCK)
        column = chunk * CHUNK + inside
        wanted = (inside < CHUNK) & (column < K)
        part = tl.load(x + m.to(tl.int64) * x_stride + column, mask=wanted, other=0.0)
        acc += part.to(DOT).to(tl.float32)
    tl.store(sums + chunk * M + m, tl.sum(acc, 0))


@triton.jit(do_not_specialize=["count", "start", "low"])
def decode_rows(
    ids, out, w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus, table,
    offsets, starts,
    count, start, low, N, K, units, out_stride, expert_stride, scale_stride, scale_rows,
    IDS: tl.constexpr, EXPERTS: tl.constexpr,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr,
    MINUS: tl.constexpr, NANS: tl.constexpr,
    BLOCK_N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """``out[i] = w[ids[i]]`` (``IDS``) or ``w[start + i]``, in the reference's own roundings.

    To be launched without fusing multiplications and additions. ``EXPERTS``: the same of experts
    ``low`` and on, one for each program of the third dimension, into ``out[expert - low]``; those
    without rows are left out.
    """
    after_earlier()
    if EXPERTS:
        expert = low + tl.program_id(2)
        if tl.load(starts + expert) == tl.load(starts + expert + 1):
            return
        out += tl.program_id(2).to(tl.int64) * expert_stride
        w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus = of_expert(
            w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus,
            offsets, expert,
        )  # fmt: skip
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = i < count
    if IDS:
        rows = tl.load(ids + i, mask=inside, other=0)
        rows = tl.minimum(tl.maximum(rows, 0), N - 1).to(tl.int32)  # others are not checked here
    else:
        rows = tl.minimum(start + i, N - 1)
    unit = tl.program_id(1)
    words = load_planes(w0, w1, w2, rows, unit, units, WIDTH, WIDTH_1, WIDTH_2, UNIT, PAIRS)
    for c in tl.static_range(UNIT // CHUNK):
        k = unit * UNIT + c * CHUNK
        at = tl.minimum(k, K - 1)
        z = load_zero(zeros, rows, N, at, GROUP, ZEROS, ZERO)
        s = load_scale(
            scale, super_scale, nested, offset, rows, N, K, at, scale_stride, scale_rows,
            GROUP, SUPER, SCALE,
        )  # fmt: skip
        for j in tl.static_range(CHUNK // (2 * PAIRS)):
            at_slice = c * (CHUNK // (2 * PAIRS)) + j
            codes = all_codes(words, at_slice, UNIT, WIDTH, WIDTH_1, WIDTH_2, PAIRS)
            if ZEROS == 32:  # a fraction would be lost beside 2^23
                none = tl.full((1, 1), 0.0, tl.float32)
                w = decode_values(codes, none, table, 0, KIND, 8, NANS, PAIRS, 0, tl.float32) - z
            else:
                w = decode_values(codes, z, table, 0, KIND, 8, NANS, PAIRS, 0, tl.float32) * FACTOR
            w = w * s[:, None]
            if MINUS != "":
                w -= load_minus(minus, super_minus, rows, N, at, GROUP, SUPER, MINUS)[:, None]
            column = k + j * 2 * PAIRS + tl.arange(0, 2 * PAIRS)
            where = out + i[:, None].to(tl.int64) * out_stride + column[None, :]
            tl.store(
                where, w.to(out.dtype.element_ty), mask=inside[:, None] & (column < K)[None, :]
            )
