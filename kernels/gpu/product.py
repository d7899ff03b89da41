"""Products with packed weights, decoded on the fly: ``y = x @ w.T``.

``w[n, k] = scale[n, g] * (value(code[n, k]) - zero[n, g]) - minus[n, g]`` with g the group of k, in
the order of ``packing.py``. A code becomes an exact small integer, table entry or short float; the
matrix units multiply those, and a group's sum is scaled in float32 afterwards, so nothing is
rounded but x and what a table holds. The minimum costs one more sum of x per group.

The weights are the left operand (``[rows, 16] x [16, tokens]``): few tokens then leave no part of
the matrix instruction empty. ``SPLIT`` programs share K; each writes a partial sum, and ``add_up``
adds them in a fixed order, so that results do not depend on which program is done first.

Must match ``reference/linear.py``: bit for bit in ``decode_rows``, 2e-3 (float16 operands), 1e-5
(float32) of the result's norm in the products.
"""

import triton
import triton.language as tl

# 16 rows lie together (packing.py), and 16 columns are the depth of a matrix instruction.
_LANES = tl.constexpr(16)


@triton.jit
def load_words(plane, n, unit, units, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """One plane's words of rows n: int32 ``[rows, 16]``, repeated where a row has fewer."""
    WORDS: tl.constexpr = UNIT * WIDTH // 32
    row = ((n // _LANES) * units + unit) * (_LANES * WORDS) + (n % _LANES) * WORDS
    lane = tl.arange(0, _LANES)
    if WORDS < 16:
        lane = lane % WORDS
    return tl.load(plane + row[:, None] + lane[None, :])


@triton.jit
def load_planes(
    w0, w1, w2, n, unit, units,
    WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The words of up to three planes; those that do not exist repeat the first."""
    words = load_words(w0, n, unit, units, WIDTH, UNIT)
    words_1 = words
    words_2 = words
    if WIDTH_1 > 0:
        words_1 = load_words(w1, n, unit, units, WIDTH_1, UNIT)
    if WIDTH_2 > 0:
        words_2 = load_words(w2, n, unit, units, WIDTH_2, UNIT)
    return words, words_1, words_2


@triton.jit
def slice_codes(words, SLICE: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """This plane's bits of columns ``16 SLICE .. 16 SLICE + 15`` of the unit."""
    WORDS: tl.constexpr = UNIT * WIDTH // 32
    if WORDS >= 16:
        shifted = words >> (WIDTH * SLICE)
    else:
        shift = tl.arange(0, _LANES) // WORDS * WIDTH + SLICE * (16 // WORDS) * WIDTH
        shifted = words >> shift[None, :]
    return shifted & ((1 << WIDTH) - 1)


@triton.jit
def all_codes(
    words, words_1, words_2, SLICE: tl.constexpr, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
):  # fmt: skip
    """Codes of a slice from up to three planes: int32 ``[rows, 16]``."""
    code = slice_codes(words, SLICE, WIDTH, UNIT)
    if WIDTH_1 > 0:
        code = code | (slice_codes(words_1, SLICE, WIDTH_1, UNIT) << WIDTH)
    if WIDTH_2 > 0:
        code = code | (slice_codes(words_2, SLICE, WIDTH_2, UNIT) << (WIDTH + WIDTH_1))
    return code


@triton.jit
def decode_values(code, zero, table, KIND: tl.constexpr, BITS: tl.constexpr, OUT: tl.constexpr):
    """What the codes stand for, less ``zero``, before any scale.

    Integers come out of the mantissa of a float whose exponent makes its last bit 1: one ``or`` and
    one subtraction instead of a conversion, which runs at a quarter of the speed. Short floats come
    out smaller than they are by a power of two, the difference of the exponents' biases (FACTORS).
    """
    if KIND == "table":
        value = tl.load(table + code)
    elif KIND == "int" and OUT == tl.float16:
        big = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
        value = big - (zero + 1024.0).to(tl.float16)
    elif KIND == "int" and OUT == tl.bfloat16 and BITS < 8:
        big = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        value = big - (zero + 128.0).to(tl.bfloat16)
    elif KIND == "int":
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)
    else:
        if KIND == "e2m1":
            half = ((code & 8) << 12) | ((code & 7) << 9)
        elif KIND == "e4m3":
            half = ((code & 128) << 8) | ((code & 127) << 7)
            half = tl.where((code & 127) == 127, 0x7E00, half)
        else:
            half = code << 8
        value = half.to(tl.int16).to(tl.float16, bitcast=True)
    return value.to(OUT)


@triton.jit
def tiny_values(
    words, words_1, words_2, table, SLICE: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
):  # fmt: skip
    """Float32 values of a slice, too small by the same power of two for all of a kind (``TINY``).

    The bits of a code are the lowest bits of a float: an integer is a denormal number then, a short
    float has the lowest bits of the exponent. Multiplying those costs nothing extra and nothing is
    converted, one ``and`` makes a number of a code that is a field of its word. Such a field may
    lie up to 15 bits too far left: the second result undoes that, multiplied with x.
    """
    PLACE: tl.constexpr = WIDTH * SLICE % 16
    step = 1.0
    if KIND == "int" and WIDTH_1 == 0 and UNIT * WIDTH >= 512:
        half = words
        if WIDTH * SLICE >= 16:
            half = words >> 16
        bits = half & (((1 << WIDTH) - 1) << PLACE)
        step = 1.0 / (1 << PLACE)
    else:
        bits = all_codes(words, words_1, words_2, SLICE, UNIT, WIDTH, WIDTH_1, WIDTH_2)
        if KIND == "e2m1":
            bits = ((bits & 8) << 28) | ((bits & 7) << 22)
        elif KIND == "e4m3":
            nan = tl.where((bits & 127) == 127, 0x7FC00000, 0)
            bits = ((bits & 128) << 24) | ((bits & 127) << 20) | nan
        elif KIND == "e5m2":
            bits = ((bits & 128) << 24) | ((bits & 127) << 21)
            bits = tl.where((bits & 0x0F800000) == 0x0F800000, bits | 0x70000000, bits)
    if KIND == "table":
        value = tl.load(table + bits)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value, step


@triton.jit
def load_scale(
    scale, super_scale, n, N, k, scale_stride, scale_rows,
    GROUP: tl.constexpr, SUPER: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The scales of rows n at column k, float32."""
    s = tl.load(scale + (k // GROUP) * scale_stride + n // scale_rows)
    if SCALE == "e8m0":
        power = tl.where(s == 0, 0x00400000, s.to(tl.int32) << 23)
        f = tl.where(s == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        f = decode_values(s.to(tl.int32), 0.0, scale, "e4m3", 8, tl.float32) * 256.0
    elif SCALE == "low4":
        f = (s & 15).to(tl.float32)
    else:
        f = s.to(tl.float32)
    if SUPER > 0:
        f = tl.load(super_scale + (k // SUPER) * N + n).to(tl.float32) * f
    return f


@triton.jit
def load_minus(
    minus, super_minus, n, N, k, GROUP: tl.constexpr, SUPER: tl.constexpr, MINUS: tl.constexpr
):
    """What is subtracted of rows n at column k, float32."""
    m = tl.load(minus + (k // GROUP) * N + n)
    if MINUS == "high4":
        m = m >> 4
    f = m.to(tl.float32)
    if MINUS != "plain":
        f = tl.load(super_minus + (k // SUPER) * N + n).to(tl.float32) * f
    return f


@triton.jit
def load_zero(zeros, zero, n, N, k, GROUP: tl.constexpr, ZEROS: tl.constexpr):
    """What is subtracted from the codes of rows n at column k: ``[rows, 1]`` or a number."""
    if ZEROS:
        z = tl.load(zeros + (k // GROUP) * N + n).to(tl.float32)[:, None]
    else:
        z = zero
    return z


@triton.jit
def scaled(
    acc, part, total, zero, scale, super_scale, minus, super_minus, n, N, k,
    scale_stride, scale_rows,
    GROUP: tl.constexpr, SUPER: tl.constexpr, SCALE: tl.constexpr, FACTOR: tl.constexpr,
    MINUS: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """``acc + part * scale - (minus + zero * scale) * total``, the latter if ``ZERO``.

    part is ``[rows, m]``, total, the sum of x, ``[m]``, zero ``[rows, 1]`` or a number.
    """
    s = load_scale(scale, super_scale, n, N, k, scale_stride, scale_rows, GROUP, SUPER, SCALE)
    s = s[:, None]
    acc += part * (s * FACTOR)
    if ZERO:
        acc -= (zero * s) * total[None, :]
    if MINUS != "":
        f = load_minus(minus, super_minus, n, N, k, GROUP, SUPER, MINUS)
        acc -= f[:, None] * total[None, :]
    return acc


@triton.jit
def product(
    x, sums, out, w0, w1, w2, scale, super_scale, zeros, minus, super_minus, table,
    M, N, K, units, share, x_stride, out_stride, part_stride, scale_stride, scale_rows, zero,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, MINUS: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One tile of ``out[split, M, N]``: ``share`` units of K of BLOCK_N rows and BLOCK_M tokens.

    Columns in runs of ``CHUNK`` have one scale; ``WHOLE``: all of a row have. ``sums``: of x over
    them, see ``add_chunks``. ``WIDEN``: multiply in float32 what was rounded to ``DOT`` (the
    interpreter multiplies bfloat16 wrongly).
    """
    MATH: tl.constexpr = tl.float32 if WIDEN else DOT
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(n, N - 1)
    tokens = x + m.to(tl.int64) * x_stride
    lane = tl.arange(0, _LANES)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    part = acc
    total = tl.zeros((BLOCK_M,), tl.float32)  # stays so without minima
    first = tl.program_id(2) * share
    for unit in range(first, tl.minimum(first + share, units)):
        words, words_1, words_2 = load_planes(
            w0, w1, w2, rows, unit, units, WIDTH, WIDTH_1, WIDTH_2, UNIT
        )
        for c in tl.static_range(UNIT // CHUNK):
            k = unit * UNIT + c * CHUNK
            at = tl.minimum(k, K - 1)  # columns of padding may belong to no group
            z = load_zero(zeros, zero, rows, N, at, GROUP, ZEROS)
            if not WHOLE:
                part = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for j in tl.static_range(CHUNK // 16):
                code = all_codes(
                    words, words_1, words_2, c * (CHUNK // 16) + j, UNIT, WIDTH, WIDTH_1, WIDTH_2
                )
                w = decode_values(code, z, table, KIND, WIDTH + WIDTH_1 + WIDTH_2, MATH)
                column = k + j * 16 + lane
                wanted = (m < M)[None, :] & (EVEN | (column < K)[:, None])
                xs = tl.load(tokens[None, :] + column[:, None], mask=wanted, other=0.0).to(DOT)
                part = tl.dot(w, xs.to(MATH), part, input_precision="ieee")
            if not WHOLE:
                if MINUS != "":
                    total = tl.load(sums + (at // CHUNK) * M + tl.minimum(m, M - 1))
                acc = scaled(
                    acc, part, total, zero, scale, super_scale, minus, super_minus, rows, N, at,
                    scale_stride, scale_rows, GROUP, SUPER, SCALE, FACTOR, MINUS, False,
                )  # fmt: skip
    if WHOLE:
        if MINUS != "":
            total = tl.load(sums + tl.program_id(2) * M + tl.minimum(m, M - 1))
        acc = scaled(
            acc, part, total, zero, scale, super_scale, minus, super_minus, rows, N, 0,
            scale_stride, scale_rows, GROUP, SUPER, SCALE, FACTOR, MINUS, False,
        )  # fmt: skip
    where = out + tl.program_id(2) * part_stride + m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(where, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


@triton.jit
def add_chunks(
    x, sums, M, K, x_stride, CHUNK: tl.constexpr, DOT: tl.constexpr, BLOCK: tl.constexpr
):
    """``sums[c, m]``: the sum of x[m], rounded to ``DOT``, over columns ``CHUNK c`` and on."""
    m = tl.program_id(1)
    chunk = tl.program_id(0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        inside = start + tl.arange(0, BLOCK)
        column = chunk * CHUNK + inside
        wanted = (inside < CHUNK) & (column < K)
        part = tl.load(x + m.to(tl.int64) * x_stride + column, mask=wanted, other=0.0)
        acc += part.to(DOT).to(tl.float32)
    tl.store(sums + chunk * M + m, tl.sum(acc, 0))


@triton.jit
def product_one(
    x, out, w0, w1, w2, scale, super_scale, zeros, minus, super_minus, table,
    N, K, units, share, part_stride, scale_stride, scale_rows, zero,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, MINUS: tl.constexpr,
    WHOLE: tl.constexpr, EVEN: tl.constexpr, RAISE: tl.constexpr,
    BLOCK_N: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """:func:`product` for one token, in float32 without matrix instructions: x is not rounded.

    ``RAISE`` times ``FACTOR`` undoes the smallness of ``tiny_values``, x bearing its share.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)
    lane = tl.arange(0, _LANES)
    acc = tl.zeros((BLOCK_N, _LANES), tl.float32)
    part = acc
    total = tl.zeros((_LANES,), tl.float32)
    first = tl.program_id(1) * share
    for unit in tl.range(first, tl.minimum(first + share, units), loop_unroll_factor=UNROLL):
        words, words_1, words_2 = load_planes(
            w0, w1, w2, rows, unit, units, WIDTH, WIDTH_1, WIDTH_2, UNIT
        )
        for c in tl.static_range(UNIT // CHUNK):
            k = unit * UNIT + c * CHUNK
            at = tl.minimum(k, K - 1)  # columns of padding may belong to no group
            z = load_zero(zeros, zero, rows, N, at, GROUP, ZEROS)
            if not WHOLE:
                part = tl.zeros((BLOCK_N, _LANES), tl.float32)
                total = tl.zeros((_LANES,), tl.float32)
            for j in tl.static_range(CHUNK // 16):
                column = k + j * 16 + lane
                xs = tl.load(x + column, mask=EVEN | (column < K), other=0.0).to(tl.float32)
                w, step = tiny_values(
                    words, words_1, words_2, table, c * (CHUNK // 16) + j, KIND, UNIT,
                    WIDTH, WIDTH_1, WIDTH_2,
                )  # fmt: skip
                part += w * (xs * (step * RAISE))[None, :]
                if KIND == "int" or MINUS != "":
                    total += xs
            if not WHOLE:
                acc = scaled(
                    acc, part, total, z, scale, super_scale, minus, super_minus, rows, N, at,
                    scale_stride, scale_rows, GROUP, SUPER, SCALE, FACTOR, MINUS, KIND == "int",
                )  # fmt: skip
    if WHOLE:
        z = load_zero(zeros, zero, rows, N, 0, GROUP, ZEROS)
        acc = scaled(
            acc, part, total, z, scale, super_scale, minus, super_minus, rows, N, 0,
            scale_stride, scale_rows, GROUP, SUPER, SCALE, FACTOR, MINUS, KIND == "int",
        )  # fmt: skip
    y = tl.sum(acc, 1).to(out.dtype.element_ty)
    tl.store(out + tl.program_id(1) * part_stride + n, y, mask=n < N)


@triton.jit
def add_up(parts, out, N, out_stride, part_stride, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """``out[m, n] = sum of parts[split, m, n]`` in the order of the splits."""
    m = tl.program_id(1)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPLIT):
        acc += tl.load(parts + i * part_stride + m.to(tl.int64) * N + n, mask=n < N, other=0.0)
    tl.store(out + m.to(tl.int64) * out_stride + n, acc.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def decode_rows(
    ids, out, w0, w1, w2, scale, super_scale, zeros, minus, super_minus, table,
    count, start, N, K, units, out_stride, scale_stride, scale_rows, zero,
    IDS: tl.constexpr,
    KIND: tl.constexpr, WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
    UNIT: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr, SUPER: tl.constexpr,
    SCALE: tl.constexpr, FACTOR: tl.constexpr, ZEROS: tl.constexpr, MINUS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``out[i] = w[ids[i]]`` (``IDS``) or ``w[start + i]``, in the reference's own roundings.

    To be launched without fusing multiplications and additions.
    """
    i = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = i < count
    if IDS:
        rows = tl.load(ids + i, mask=inside, other=0).to(tl.int32)
    else:
        rows = tl.minimum(start + i, N - 1)
    unit = tl.program_id(1)
    words, words_1, words_2 = load_planes(
        w0, w1, w2, rows, unit, units, WIDTH, WIDTH_1, WIDTH_2, UNIT
    )
    for c in tl.static_range(UNIT // CHUNK):
        k = unit * UNIT + c * CHUNK
        at = tl.minimum(k, K - 1)
        z = load_zero(zeros, zero, rows, N, at, GROUP, ZEROS)
        s = load_scale(
            scale, super_scale, rows, N, at, scale_stride, scale_rows, GROUP, SUPER, SCALE
        )
        for j in tl.static_range(CHUNK // 16):
            code = all_codes(
                words, words_1, words_2, c * (CHUNK // 16) + j, UNIT, WIDTH, WIDTH_1, WIDTH_2
            )
            w = decode_values(code, z, table, KIND, WIDTH + WIDTH_1 + WIDTH_2, tl.float32) * FACTOR
            w = w * s[:, None]
            if MINUS != "":
                w -= load_minus(minus, super_minus, rows, N, at, GROUP, SUPER, MINUS)[:, None]
            column = k + j * 16 + tl.arange(0, _LANES)
            where = out + i[:, None].to(tl.int64) * out_stride + column[None, :]
            tl.store(
                where, w.to(out.dtype.element_ty), mask=inside[:, None] & (column < K)[None, :]
            )
