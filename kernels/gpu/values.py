"""Values of codes and scales of packed weights (``packing.py``), for use in Triton kernels.

``value(code)`` is an exact small integer, a table entry or a short float. The definition is
``kernels/reference/decode.py``; the order of data is that of ``packing.py``.

A kernel handles slices of ``2 * PAIRS`` columns. ``[rows, PAIRS]`` words hold the codes of a slice
at one place in their lower and one in their upper half: two neighbouring columns, which are one
register of a 16-bit operand, so that every instruction on the way there handles both.
"""

import triton
import triton.language as tl

# Rows that lie together (packing.py).
ROWS = tl.constexpr(16)


@triton.jit
def load_words(
    plane, n, unit, units,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, PAIRS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Words ``PAIRS * PART`` and on of one plane's rows n: int32 ``[rows, PAIRS]``.

    They are repeated where a row has fewer.
    """
    WORDS: tl.constexpr = UNIT * WIDTH // 32
    row = ((n // ROWS) * units + unit) * (ROWS * WORDS) + (n % ROWS) * WORDS
    lane = tl.arange(0, PAIRS)
    if WORDS < PAIRS:
        lane = lane % WORDS
    if WORDS > PAIRS:
        lane = lane + PAIRS * PART
    return tl.load(plane + row[:, None] + lane[None, :])


@triton.jit
def load_planes(
    w0, w1, w2, n, unit, units,
    WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, UNIT: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """The words of the first plane in two parts, and of the second and third plane.

    Parts and planes that do not exist repeat the first. Only the first may have two parts: it has
    16 words or fewer, and the others at most half as many.
    """
    words = load_words(w0, n, unit, units, WIDTH, UNIT, PAIRS, 0)
    upper = words
    words_1 = words
    words_2 = words
    if UNIT * WIDTH // 32 > PAIRS:
        upper = load_words(w0, n, unit, units, WIDTH, UNIT, PAIRS, 1)
    if WIDTH_1 > 0:
        words_1 = load_words(w1, n, unit, units, WIDTH_1, UNIT, PAIRS, 0)
    if WIDTH_2 > 0:
        words_2 = load_words(w2, n, unit, units, WIDTH_2, UNIT, PAIRS, 0)
    return words, upper, words_1, words_2


@triton.jit
def slice_codes(
    words, upper, SLICE: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr, PAIRS: tl.constexpr
):
    """This plane's bits of a slice of the unit, in the lowest bits of both halves of words."""
    WORDS: tl.constexpr = UNIT * WIDTH // 32
    MASK: tl.constexpr = (1 << WIDTH) - 1
    if WORDS > PAIRS:
        chosen = words if SLICE % 2 == 0 else upper
        shifted = chosen >> (WIDTH * (SLICE // 2))
    elif WORDS == PAIRS:
        shifted = words >> (WIDTH * SLICE)
    else:
        shift = tl.arange(0, PAIRS) // WORDS * WIDTH + SLICE * (PAIRS // WORDS) * WIDTH
        shifted = words >> shift[None, :]
    return shifted & (MASK | (MASK << 16))


@triton.jit
def all_codes(
    words, SLICE: tl.constexpr, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Codes of a slice from up to three planes, two in each number: int32 ``[rows, PAIRS]``."""
    codes = slice_codes(words[0], words[1], SLICE, WIDTH, UNIT, PAIRS)
    if WIDTH_1 > 0:
        more = slice_codes(words[2], words[2], SLICE, WIDTH_1, UNIT, PAIRS)
        codes = codes | (more << WIDTH)
    if WIDTH_2 > 0:
        more = slice_codes(words[3], words[3], SLICE, WIDTH_2, UNIT, PAIRS)
        codes = codes | (more << (WIDTH + WIDTH_1))
    return codes


@triton.jit
def woven(even, odd, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """Even and odd columns ``[rows, PAIRS]`` in the order of columns: ``[rows, 2 PAIRS]``.

    Word i of a slice has column pair ``i % (PAIRS / 4) * 4 + i // (PAIRS / 4)`` (``packing.py``). A
    thread loads ``PAIRS / 4`` words, and those pairs are its elements of a matrix instruction's
    operand: nothing moves between threads. For that ``WARPS``, the number of warps, must be given,
    and the rows of the words be in the order of ``shares.tile_rows``; they come out in theirs. 0:
    the rows stay as they are, and where an operand is needed, the elements move.
    """
    N: tl.constexpr = even.shape[0]
    EACH: tl.constexpr = PAIRS // 4
    both = tl.join(even, odd)
    if WARPS > 0:
        both = tl.reshape(both, (N // (8 * WARPS), WARPS, 8, 4, EACH, 2))
        both = tl.permute(both, (1, 0, 2, 4, 3, 5))
    else:
        both = tl.permute(tl.reshape(both, (N, 4, EACH, 2)), (0, 2, 1, 3))
    return tl.reshape(both, (N, 2 * PAIRS))


@triton.jit
def halves_of(pairs, PAIRS: tl.constexpr, WARPS: tl.constexpr):
    """The lower and upper halves of ``pairs [rows, PAIRS]``, :func:`woven`: int16."""
    return woven(pairs.to(tl.int16), (pairs >> 16).to(tl.int16), PAIRS, WARPS)


@triton.jit
def decode_values(
    codes, zero, table, nothing,
    KIND: tl.constexpr, BITS: tl.constexpr, NANS: tl.constexpr, PAIRS: tl.constexpr,
    WARPS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    """What the codes of :func:`all_codes` stand for, less ``zero``, before any scale:
    ``[rows, 2 PAIRS]``, with zero in the order of rows of the codes.

    Integers come out of the mantissa of a float whose exponent makes its last bit 1: one ``or`` and
    one subtraction instead of a conversion, which runs at a quarter of the speed. Short floats come
    out smaller than they are by a power of two, the difference of the exponents' biases (FACTORS).

    ``nothing``: a 0 that is not a constant. A mask and an exponent that both are constants stay two
    instructions, because NVIDIA's LOP3 has room for one. Odd columns come before even ones, because
    ptxas joins two subtractions of 16 bits and puts the first into the upper half of the register:
    the other way round it swaps all halves twice (68 PRMT instead of 29 for 64 weights).
    """
    if KIND == "table":
        odd = tl.load(table + (codes >> 16))
        even = tl.load(table + (codes & 0xFF))
        value = woven(even, odd, PAIRS, WARPS)
    elif KIND == "int" and OUT == tl.float16:
        big, less = codes | (nothing | 0x64006400), (zero + 1024.0).to(tl.float16)
        odd = (big >> 16).to(tl.int16).to(tl.float16, bitcast=True) - less
        even = big.to(tl.int16).to(tl.float16, bitcast=True) - less
        value = woven(even, odd, PAIRS, WARPS)
    elif KIND == "int" and OUT == tl.bfloat16 and BITS < 8:
        big, less = codes | (nothing | 0x43004300), (zero + 128.0).to(tl.bfloat16)
        odd = (big >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True) - less
        even = big.to(tl.int16).to(tl.bfloat16, bitcast=True) - less
        value = woven(even, odd, PAIRS, WARPS)
    elif KIND == "int":
        less = zero + 8388608.0
        odd = ((codes >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - less
        even = ((codes & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - less
        value = woven(even.to(OUT), odd.to(OUT), PAIRS, WARPS)
    else:
        if KIND == "e2m1":
            half = halves_of(((codes & 0x80008) << 12) | ((codes & 0x70007) << 9), PAIRS, WARPS)
        elif KIND == "e4m3":
            half = halves_of(((codes & 0x800080) << 8) | ((codes & 0x7F007F) << 7), PAIRS, WARPS)
            if NANS:
                half = tl.where((half & 0x3F80) == 0x3F80, 0x7E00, half).to(tl.int16)
        else:
            half = halves_of(codes << 8, PAIRS, WARPS)
        value = half.to(tl.float16, bitcast=True)
    return value.to(OUT)


@triton.jit
def e4m3_value(code):
    """The float32 value of the e4m3 floats whose bits are ``code``."""
    half = ((code & 128) << 8) | ((code & 127) << 7)
    half = tl.where((code & 127) == 127, 0x7E00, half)
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


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
        f = e4m3_value(s.to(tl.int32))
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
