"""KV pages as the Triton kernels take them, and the codes in them.

On the GPU a page's keys and values of one head both lie ``[page_size][head_dim]``, so that the
threads of a warp read one key in pieces of 16 bytes. (On the CPU keys lie transposed: there
neighbouring keys are the lanes of a vector.)

Keys and values each have a type of their own. In int4 (uint8 ``[..., head_dim / 2]``) element d is
the low half of byte d or the high half of byte ``d - head_dim / 2``.

Codes have scales ``[num_pages, kv_heads * groups, page_size]``, one for ``32 * ceil(head_dim / (32
* groups))`` dimensions: float16, value = scale * code; or for int4 int16, the upper 8 bits of a
float16 without sign in its low byte and a zero in sixteenths in its high one, value = scale * (code
- zero). Integers lie mixed (``reference/page_codes.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.launch import expect_on_device
from sdk.kernels.kv_pages import KVPages

FLOAT, INT8, E4M3, E5M2, INT4 = (tl.constexpr(i) for i in range(5))
_KINDS = {
    torch.float32: FLOAT.value,
    torch.float16: FLOAT.value,
    torch.bfloat16: FLOAT.value,
    torch.int8: INT8.value,
    torch.float8_e4m3fn: E4M3.value,
    torch.float8_e5m2: E5M2.value,
    torch.uint8: INT4.value,
}
_NAMES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")
MAX_HEAD_DIM = 256


def reject(problem: Problem) -> str | None:
    """Why the Triton kernels decline the pages of a problem."""
    for name in problem.kv_dtype.split("/"):
        if name not in _NAMES:
            return f"KV pages of {name}: expected {', '.join(_NAMES)}"
    if problem.head_dim % 8 or not 0 < problem.head_dim <= MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim}: expected a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


@dataclass(frozen=True, slots=True)
class PageSide:
    """The keys or the values of a layer, as kernels take them.

    ``codes`` and ``scales`` (the codes once more where there are none); ``strides`` of page, head
    and slot, then of page and group of the scales. ``kind`` is one of the numbers above; ``groups``
    scales belong to a head, each to ``group`` dimensions, a power of two (0: one for all of them).
    """

    codes: Tensor
    scales: Tensor
    strides: tuple[int, ...]
    kind: int
    groups: int
    group: int

    @property
    def mixed(self) -> bool:
        return self.kind in (INT8.value, INT4.value)


def page_sides(pages: KVPages, head_dim: int) -> tuple[PageSide, PageSide]:
    """Keys and values. :raises KernelError: unless they are what this module says."""
    if pages.k.shape[:3] != pages.v.shape[:3]:
        raise KernelError(
            f"KV pages: k {list(pages.k.shape)} and v {list(pages.v.shape)} do not agree"
        )
    expect_on_device("KV pages", pages.k, pages.v, pages.k_scale, pages.v_scale)
    return _side(pages.k, pages.k_scale, head_dim), _side(pages.v, pages.v_scale, head_dim)


def _side(codes: Tensor, scales: Tensor | None, head_dim: int) -> PageSide:
    kind = _KINDS.get(codes.dtype)
    wide = head_dim // 2 if kind == INT4.value else head_dim
    if kind is None or codes.shape[3] != wide or codes.stride(3) != 1:
        raise KernelError(
            f"KV pages: expected [pages, heads, page_size, {wide}] of a known type that lie "
            f"[page_size, {wide}] in a page, found {codes.dtype} {list(codes.shape)} with strides "
            f"{codes.stride()}"
        )
    if kind == FLOAT.value:
        return PageSide(codes, codes, (*codes.stride()[:3], 0, 0), kind, 1, 0)
    count, heads, slots, _ = codes.shape
    dtype = torch.int16 if kind == INT4.value else torch.float16
    groups = 0 if scales is None else scales.shape[1] // heads
    if scales is None or not groups or scales.shape != (count, heads * groups, slots):
        found = None if scales is None else list(scales.shape)
        raise KernelError(
            f"KV pages: expected scales [{count}, {heads} * groups, {slots}], found {found}"
        )
    group = -(-head_dim // (32 * groups)) * 32 if groups > 1 else 0
    if scales.dtype != dtype or scales.stride(2) != 1 or group & (group - 1):
        raise KernelError(
            f"KV pages: expected contiguous {dtype} scales for a power of two of dimensions, found "
            f"{scales.dtype} with strides {scales.stride()} for {group}"
        )
    if kind in (E4M3.value, E5M2.value):
        codes = codes.view(torch.uint8)
    return PageSide(codes, scales, (*codes.stride()[:3], *scales.stride()[:2]), kind, groups, group)


def hadamard_block(head_dim: int) -> int:
    """The size of the Hadamard matrix that mixes a head: see ``reference/page_codes.py``."""
    return head_dim & -head_dim
