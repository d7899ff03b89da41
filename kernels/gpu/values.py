"""Values of codes and scales of packed weights (``packing.py``), for use in Triton kernels.

``value(code)`` is an exact small integer, a table entry or a short float. The definition is
``kernels/reference/decode.py``; the order of data is that of ``packing.py``.
"""

import triton
import triton.language as tl

# 16 rows lie together (packing.py), and 16 columns are the depth of a matrix instruction.
LANES = tl.constexpr(16)


@triton.jit
def load_words(plane, n, unit, units, WIDTH: tl.constexpr, UNIT: tl.constexpr):
    """One plane's words of rows n: int32 ``[rows, 16]``, repeated where a row has fewer."""
    WORDS: tl.constexpr = UNIT * WIDTH // 32
    row = ((n // LANES) * units + unit) * (LANES * WORDS) + (n % LANES) * WORDS
    lane = tl.arange(0, LANES)
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
        shift = tl.arange(0, LANES) // WORDS * WIDTH + SLICE * (16 // WORDS) * WIDTH
        shifted = words >> shift[None, :]
    return shifted & ((1 << WIDTH) - 1)


@triton.jit
def all_codes(
    words, SLICE: tl.constexpr, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr,
):  # fmt: skip
    """Codes of a slice from up to three planes: int32 ``[rows, 16]``."""
    code = slice_codes(words[0], SLICE, WIDTH, UNIT)
    if WIDTH_1 > 0:
        code = code | (slice_codes(words[1], SLICE, WIDTH_1, UNIT) << WIDTH)
    if WIDTH_2 > 0:
        code = code | (slice_codes(words[2], SLICE, WIDTH_2, UNIT) << (WIDTH + WIDTH_1))
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
    words, table, SLICE: tl.constexpr, KIND: tl.constexpr, UNIT: tl.constexpr,
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
        half = words[0]
        if WIDTH * SLICE >= 16:
            half = words[0] >> 16
        bits = half & (((1 << WIDTH) - 1) << PLACE)
        step = 1.0 / (1 << PLACE)
    else:
        bits = all_codes(words, SLICE, UNIT, WIDTH, WIDTH_1, WIDTH_2)
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
    scale, super_scale, nested, offset, n, N, K, k, scale_stride, scale_rows,
    GROUP: tl.constexpr, SUPER: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The scales of rows n at column k, float32.

    ``SCALE`` says what bytes mean; ``nested``: entries of the table of that name, whose super
    scales run on over the ends of rows, and ``offset`` is added.
    """
    s = tl.load(scale + (k // GROUP) * scale_stride + n // scale_rows)
    if SCALE == "e8m0":
        power = tl.where(s == 0, 0x00400000, s.to(tl.int32) << 23)
        f = tl.where(s == 255, 0x7FC00000, power).to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        f = decode_values(s.to(tl.int32), 0.0, scale, "e4m3", 8, tl.float32) * 256.0
    elif SCALE == "low4":
        f = (s & 15).to(tl.float32)
    elif SCALE == "nested":
        run = (n.to(tl.int64) * K + k) // SUPER
        f = tl.load(nested + s.to(tl.int32)) * tl.load(super_scale + run) + tl.load(offset + n)
    else:
        f = s.to(tl.float32)
    if SUPER > 0 and SCALE != "nested":
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
def load_zero(zeros, n, N, k, GROUP: tl.constexpr, ZEROS: tl.constexpr, ZERO: tl.constexpr):
    """What is subtracted from the codes of rows n at column k: ``[rows, 1]`` or ``[1, 1]``.

    ``ZEROS``: bits of a zero point, several to a byte along K; 32: floats; 0: ``ZERO`` for all. A
    constant, because a number from a register would keep words from being loaded in the order of
    the matrix units (seen with Triton 3.6: decoded weights then go through shared memory).
    """
    group = k // GROUP
    if ZEROS == 0:
        z = tl.full((1, 1), ZERO, tl.float32)
    elif ZEROS == 32:
        z = tl.load(zeros + group * N + n).to(tl.float32)[:, None]
    else:
        PER: tl.constexpr = 8 // ZEROS
        byte = tl.load(zeros + (group // PER) * N + n).to(tl.int32)
        z = ((byte >> (group % PER * ZEROS)) & ((1 << ZEROS) - 1)).to(tl.float32)[:, None]
    return z
