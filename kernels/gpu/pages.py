"""KV pages as the Triton kernels take them, and the codes in them.

On the GPU a page's keys and values of one head both lie ``[page_size][head_dim]``, so that the
threads of a warp read one key in pieces of 16 bytes; both have the same strides. (On the CPU keys
lie transposed: there neighbouring keys are the lanes of a vector.)

8-bit floats are read and written as bytes, in integer arithmetic: cards before compute capability
8.9 have no instruction for e4m3, and AMD's gfx942 has another e4m3 in its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.launch import expect_on_device
from sdk.kernels.layouts import KVPages
from sdk.kernels.registry import Problem

#: How a page's elements are read: as floats, as int8, as e4m3 or e5m2 bytes.
FLOAT, INT8, E4M3, E5M2 = (tl.constexpr(i) for i in range(4))
KINDS = {
    "float32": 0,
    "float16": 0,
    "bfloat16": 0,
    "int8": 1,
    "float8_e4m3fn": 2,
    "float8_e5m2": 3,
}
MAX_HEAD_DIM = 256


def reject(problem: Problem) -> str | None:
    """Why the Triton kernels decline the pages of a problem."""
    if problem.kv_dtype not in KINDS:
        return f"KV pages of {problem.kv_dtype}: expected {', '.join(KINDS)}"
    if problem.head_dim % 8 or not 0 < problem.head_dim <= MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim}: expected a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def kind(pages: KVPages) -> int:
    """The pages' entry of :data:`KINDS`."""
    return KINDS[str(pages.k.dtype).removeprefix("torch.")]


def check_pages(pages: KVPages, kv_heads: int, head_dim: int) -> None:
    """:raises KernelError: unless the pages are what this module says, for this head shape."""
    k, v = pages.k, pages.v
    if k.shape != v.shape or k.dtype != v.dtype or k.stride() != v.stride():
        raise KernelError(
            f"KV pages: k {list(k.shape)} {k.dtype} {k.stride()} and "
            f"v {list(v.shape)} {v.dtype} {v.stride()} do not agree"
        )
    if k.shape[1] != kv_heads or k.shape[3] != head_dim:
        raise KernelError(
            f"KV pages: expected [pages, {kv_heads}, page_size, {head_dim}], found {list(k.shape)}"
        )
    if k.stride(3) != 1:
        raise KernelError(
            "KV pages: expected keys and values that lie [page_size, head_dim] in a page, "
            f"found strides {k.stride()}"
        )
    expect_on_device("KV pages", k, v, pages.k_scale, pages.v_scale)
    if kind(pages):
        shape, scales = k.shape[:3], (pages.k_scale, pages.v_scale)
        for scale in scales:
            if scale is None or scale.shape != shape or scale.dtype != torch.float16:
                found = None if scale is None else f"{scale.dtype} {list(scale.shape)}"
                raise KernelError(f"KV pages: expected float16 scales {list(shape)}, found {found}")
        strides = {scale.stride() for scale in scales if scale is not None}
        if len(strides) != 1 or next(iter(strides))[2] != 1:
            raise KernelError(f"KV pages: the scales' strides {sorted(strides)} do not agree")


def page_arguments(pages: KVPages) -> tuple[object, ...]:
    """Keys, values, their scales, then ``page, head, slot`` strides and ``page, head`` of scales.

    Without scales the pages stand in for them: kernels do not look.
    """
    k, v = pages.k, pages.v
    if pages.k_scale is None or pages.v_scale is None:
        return (k, v, k, v, *k.stride()[:3], 0, 0)
    if kind(pages) >= E4M3.value:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    return (k, v, pages.k_scale, pages.v_scale, *k.stride()[:3], *pages.k_scale.stride()[:2])


def hadamard_block(head_dim: int) -> int:
    """The size of the Hadamard matrix that mixes a head: see ``reference/rope.py``."""
    return head_dim & -head_dim


@triton.jit
def mixed(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``x [ROWS, WIDTH]`` times the Hadamard matrix of ``BLOCK`` along the last dimension.

    Sums in the order of ``reference/rope.py`` and so the same bits.
    """
    for i in tl.static_range(8):
        if (1 << i) < BLOCK:
            pairs = tl.reshape(x, (ROWS, WIDTH // (2 << i), 2, 1 << i))
            first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            pairs = tl.join(first + second, first - second)
            x = tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, WIDTH))
    return x * (1.0 / (BLOCK**0.5))


@triton.jit
def load_values(pointers, mask, KIND: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr):
    """Elements of pages as ``DOT``, the type of a product's operands; e4m3 as its 256th part."""
    x = tl.load(pointers, mask=mask, other=0)
    if KIND == E4M3:
        # The bits of an e4m3 are those of a float16 2^8 times smaller, subnormals included.
        wide = x.to(tl.uint16)
        x = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif KIND == E5M2:
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return operand(x, DOT, WIDEN)


@triton.jit
def operand(x, DOT: tl.constexpr, WIDEN: tl.constexpr):
    """``x`` rounded to ``DOT``; ``WIDEN``: to bfloat16, held in float32."""
    if WIDEN:
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
def to_codes(x, KIND: tl.constexpr):
    """Float32 within the range of ``KIND`` to its nearest code: int8, or the byte of an 8-bit
    float (ties to even, as torch rounds)."""
    if KIND == INT8:
        codes = round_even(x).to(tl.int8)
    elif KIND == E4M3:
        codes = _to_float8(x, 3, 7).to(tl.uint8)
    else:
        codes = _to_float8(x, 2, 15).to(tl.uint8)
    return codes


@triton.jit
def _to_float8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
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
