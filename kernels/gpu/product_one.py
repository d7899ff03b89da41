"""Products of one token with packed weights, without matrix instructions: ``y = w @ x`` in float32;
and of a few, one by one, on cards that have none.

With one token the card's memory limits, as long as there are few instructions per weight. A code
therefore becomes a float by one ``and``: it stays at its place in its word, where the bits of a
small integer are a denormal float, of a short float (e4m3, ...) the lowest bits of an exponent.
Powers of two, of the place and of the kind, are x's share or that of the end result. A program has
so many rows that a thread uses each value of x for several (4 or 8).

Four threads share a row. A thread's words of a slice are taken apart (:func:`words_of`), so that
it adds everything of a row to one number: scales, zero points and minima cost one instruction per
row and group. Words are loaded one unit ahead.

Must match ``reference/linear.py`` to 1e-5 of the result's norm: x is not rounded.
"""

import triton
import triton.language as tl

from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.product import of_expert
from sdk.kernels.gpu.shares import store_tile, tile_rows
from sdk.kernels.gpu.values import all_codes, load_planes, load_scale, load_zero

#: Triton before 3.7 orders a load without neighbours by columns, later ones by rows; for the other
#: order data would move through shared memory, with 16 barriers in each turn.
_TURNED = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


@triton.jit
def words_of(words, PAIRS: tl.constexpr):
    """``words [rows, PAIRS]`` by their number within a thread, of which four have a row: four times
    ``[rows, 4]``, the last two of which repeat the others with 8 pairs."""
    N: tl.constexpr = words.shape[0]
    if PAIRS == 16:
        even, odd = tl.split(tl.reshape(words, (N, 4, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        a, b = tl.split(tl.reshape(words, (N, 4, 2)))
        c, d = a, b
    return a, b, c, d


@triton.jit
def small_values(
    words, table, SLICE: tl.constexpr, EACH: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    NANS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Float32 values of the even columns of a slice, or the odd ones (``HALF`` 1), in a thread's
    word number ``EACH``: ``[rows, 4]``; and what undoes the place they have in it.

    They are too small by the same power of two for all of a kind (``TINY``). The bits up to number
    23 of a float are an integer: a code that ends below is left where it is, others go 8 bits down.
    """
    WORDS: tl.constexpr = UNIT * WIDTH // 32
    step = 1.0
    if WIDTH_1 > 0 or WORDS < PAIRS:
        codes = all_codes(words, SLICE, UNIT, WIDTH, WIDTH_1, WIDTH_2, PAIRS)
        PLACE: tl.constexpr = 16 * HALF
    else:
        PARTS: tl.constexpr = WORDS // PAIRS
        codes = words[SLICE % PARTS]
        # Triton evaluates one branch
        PLACE: tl.constexpr = WIDTH * (SLICE // PARTS) + 16 * HALF  # type: ignore[no-redef]
    codes = words_of(codes, PAIRS)[EACH]
    BITS: tl.constexpr = WIDTH + WIDTH_1 + WIDTH_2
    if KIND == "int":
        LOWER: tl.constexpr = 8 if PLACE + BITS > 24 else 0
        bits = (codes >> LOWER) & (((1 << BITS) - 1) << (PLACE - LOWER))
        step = 1.0 / (1 << (PLACE - LOWER))
    elif KIND == "table":
        bits = (codes >> PLACE) & ((1 << BITS) - 1)
    else:
        # the sign is repeated when the code goes down from the top
        top = codes << (32 - BITS - PLACE)
        if KIND == "e2m1":
            bits = (top >> 6) & -0x7E400000
        elif KIND == "e4m3":
            bits = (top >> 4) & -0x78100000
            if NANS:
                bits = tl.where((bits & 0x07F00000) == 0x07F00000, 0x7FC00000, bits)
        else:
            bits = (top >> 3) & -0x70200000
            if NANS:
                bits = tl.where((bits & 0x0F800000) == 0x0F800000, bits | 0x70000000, bits)
    if KIND == "table" and _TURNED:
        value = tl.trans(tl.load(table + tl.trans(bits)))
    elif KIND == "table":
        value = tl.load(table + bits)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value, step


@triton.jit
def add_chunk(
    part, words, x, table, k, K, FIRST: tl.constexpr,
    KIND: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr, CHUNK: tl.constexpr, EVEN: tl.constexpr, RAISE: tl.constexpr,
    NANS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One chunk of :func:`product_one`, columns k and on: products added to ``part [rows, 4]``, and
    the sums of x ``[4]``."""
    total = tl.zeros((4,), tl.float32)
    lane = 2 * tl.arange(0, 4)
    start = x + k + lane
    for j in tl.static_range(CHUNK // (2 * PAIRS)):
        for each in tl.static_range(PAIRS // 4):
            at = j * 2 * PAIRS + 8 * each
            if EVEN and x.dtype.element_ty == tl.bfloat16:
                both = tl.load((start + at).to(tl.pointer_type(tl.int32)))
                even = (both << 16).to(tl.float32, bitcast=True)
                odd = (both & -65536).to(tl.float32, bitcast=True)
            else:
                left = K - k - at - lane
                even = tl.load(start + at, mask=EVEN | (left > 0), other=0.0).to(tl.float32)
                odd = tl.load(start + at + 1, mask=EVEN | (left > 1), other=0.0).to(tl.float32)
            total += even + odd
            w, step = small_values(
                words, table, FIRST + j, each, 0, KIND, UNIT, WIDTH, WIDTH_1, WIDTH_2, NANS, PAIRS
            )
            part += w * (even * (step * RAISE))[None, :]
            w, step = small_values(
                words, table, FIRST + j, each, 1, KIND, UNIT, WIDTH, WIDTH_1, WIDTH_2, NANS, PAIRS
            )
            part += w * (odd * (step * RAISE))[None, :]
    return part, total


@triton.jit
def scaled(
    acc, part, total, scale, super_scale, nested, offset, zeros, minus, super_minus, n, N, K, k,
    scale_stride, scale_rows, own_scale, own_minus,
    UNIT: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr, SCALE: tl.constexpr,
    FACTOR: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr, MINUS: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """``acc + (part - zero * total) * scale - minus * total`` of rows n at column k, all but part
    times ``1 / FACTOR``. ``ONCE``: the super scales are given."""
    total *= 1.0 / FACTOR
    if ZEROS > 0:
        part -= load_zero(zeros, n, N, k, GROUP, ZEROS, ZERO) * total[None, :]
    elif ZERO != 0:
        part -= (ZERO * total)[None, :]
    if ONCE:
        s = own_scale * load_scale(
            scale, super_scale, nested, offset, n, N, K, k, scale_stride, scale_rows,
            GROUP, 0, SCALE,
        )  # fmt: skip
    else:
        s = load_scale(
            scale, super_scale, nested, offset, n, N, K, k, scale_stride, scale_rows,
            GROUP, SUPER, SCALE,
        )  # fmt: skip
    acc += part * s[:, None]
    if MINUS != "":
        m = tl.load(minus + (k // GROUP) * N + n)
        if MINUS == "high4":
            m = m >> 4
        f = m.to(tl.float32)
        if ONCE:
            f *= own_minus
        elif MINUS != "plain":
            f *= tl.load(super_minus + (k // SUPER) * N + n).to(tl.float32)
        acc -= f[:, None] * total[None, :]
    return acc


@triton.jit
def add_unit(
    acc, part, total, words, x, table, scale, super_scale, nested, offset, zeros, minus,
    super_minus, rows, unit, N, K, scale_stride, scale_rows,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr,
    MINUS: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr, RAISE: tl.constexpr,
    NANS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One unit of :func:`product_one`: scaled sums added to acc, or with ``WHOLE``, one scale for
    all of a row, sums of products to part and of x to total."""
    # Super scales are the same for all of a unit, except where K has short units.
    ONCE: tl.constexpr = SUPER > 0 and SCALE != "nested" and SUPER % UNIT == 0 and CHUNK < UNIT
    own_scale = 1.0
    own_minus = 1.0
    if ONCE:
        run = (tl.minimum(unit * UNIT, K - 1) // SUPER) * N + rows
        own_scale = tl.load(super_scale + run).to(tl.float32)
        if MINUS != "" and MINUS != "plain":
            own_minus = tl.load(super_minus + run).to(tl.float32)
    for chunk in tl.static_range(UNIT // CHUNK):
        k = unit * UNIT + chunk * CHUNK
        if not WHOLE:
            part = tl.zeros((rows.shape[0], 4), tl.float32)
        part, more = add_chunk(
            part, words, x, table, k, K, chunk * (CHUNK // (2 * PAIRS)), KIND, UNIT,
            WIDTH, WIDTH_1, WIDTH_2, CHUNK, EVEN, RAISE, NANS, PAIRS,
        )  # fmt: skip
        if WHOLE:
            total += more
        else:
            acc = scaled(
                acc, part, more, scale, super_scale, nested, offset, zeros, minus, super_minus,
                rows, N, K, tl.minimum(k, K - 1),  # columns of padding may belong to no group
                scale_stride, scale_rows, own_scale, own_minus,
                UNIT, GROUP, SUPER, SCALE, FACTOR, ZEROS, ZERO, MINUS, ONCE,
            )  # fmt: skip
    return acc, part, total


@triton.jit(do_not_specialize=["share", "split"])
def product_one(
    x, out, parts, counters, w0, w1, w2, scale, super_scale, nested, offset, zeros, minus,
    super_minus, table, offsets, owners, sources,
    N, K, units, share, split, x_stride, out_stride, part_stride, scale_stride, scale_rows,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr,
    MINUS: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, RAISE: tl.constexpr, NANS: tl.constexpr,
    BLOCK_N: tl.constexpr, ROUTED: tl.constexpr, EARLY: tl.constexpr, SHARED: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one row of ``out``, ``share`` units of K.

    Grid (rows of x, tiles of rows of the weight, split): programs that run together share weights.

    ``FACTOR`` undoes the smallness of :func:`small_values`, of which x bears ``RAISE``.
    ``ROUTED``: a row of out is that of one of the token's experts. ``EARLY``: the first words are
    loaded while earlier kernels still run. Weights that a step copies from the host may not be, nor
    those of an expert that an earlier kernel chooses.
    """
    block = tl.program_id(1)
    rows, there = tile_rows(block, N, BLOCK_N, ACTIVATION, 0)
    first = tl.program_id(2) * share
    end = tl.minimum(first + share, units)
    if EARLY:  # no kernel writes weights
        a, b, c, d = load_planes(
            w0, w1, w2, rows, tl.minimum(first, units - 1), units,
            WIDTH, WIDTH_1, WIDTH_2, UNIT, PAIRS,
        )  # fmt: skip
    after_earlier()
    row = tl.program_id(0)
    source = row
    if ROUTED:
        w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus = of_expert(
            w0, w1, w2, scale, super_scale, nested, offset, zeros, minus, super_minus,
            offsets, tl.load(owners + row),
        )  # fmt: skip
        if sources is not None:
            source = tl.load(sources + row)
    if not EARLY:
        a, b, c, d = load_planes(
            w0, w1, w2, rows, tl.minimum(first, units - 1), units,
            WIDTH, WIDTH_1, WIDTH_2, UNIT, PAIRS,
        )  # fmt: skip
    x += source.to(tl.int64) * x_stride
    acc = tl.zeros((BLOCK_N, 4), tl.float32)
    part = acc
    total = tl.zeros((4,), tl.float32)
    for unit in range(first, end):
        words = (a, b, c, d)
        # In the last turn the same words come again, from the first-level cache.
        later = tl.minimum(unit + 1, end - 1)
        a, b, c, d = load_planes(
            w0, w1, w2, rows, later, units, WIDTH, WIDTH_1, WIDTH_2, UNIT, PAIRS
        )
        tl.debug_barrier()  # ptxas would move the loads down to their use
        acc, part, total = add_unit(
            acc, part, total, words, x, table, scale, super_scale, nested, offset, zeros, minus,
            super_minus, rows, unit, N, K, scale_stride, scale_rows, KIND, WIDTH, WIDTH_1, WIDTH_2,
            UNIT, CHUNK, GROUP, SUPER, SCALE, FACTOR, ZEROS, ZERO, MINUS, WHOLE, EVEN, RAISE, NANS,
            PAIRS,
        )  # fmt: skip
    if WHOLE:
        acc = scaled(
            acc, part, total, scale, super_scale, nested, offset, zeros, minus, super_minus,
            rows, N, K, 0, scale_stride, scale_rows, 1.0, 1.0,
            UNIT, GROUP, SUPER, SCALE, FACTOR, ZEROS, ZERO, MINUS, False,
        )  # fmt: skip
    m = row + tl.arange(0, 1)
    store_tile(
        (tl.sum(acc, 1) * FACTOR)[:, None], block, rows, there, m, m == row,
        out, out_stride, parts, part_stride,
        counters, row * tl.num_programs(1) + block, tl.program_id(2), split, N,
        SHARED, ACTIVATION, BLOCK_N, 1,
    )  # fmt: skip
