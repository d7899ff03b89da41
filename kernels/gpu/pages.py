"""KV pages for the Triton kernels.

On the GPU a page's keys and values of one head are both ``[page_size][head_dim]`` in memory, so
that the threads of a warp read one key in pieces of 16 bytes. (On the CPU keys are transposed:
there neighbouring keys are the lanes of a vector.) Types, scales and their groups are those of
``KVPages`` and ``kv/kv_types.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.launch import expect_on_device
from sdk.kernels.kv.kv_types import KV_TYPES, KVType, scale_group
from sdk.kernels.kv.pages import KVPages

#: How kernels name the types: ``KVType.gpu_kind``.
FLOAT, INT8, E4M3, E5M2, INT4 = (tl.constexpr(i) for i in range(5))
_NAMES = tuple(kind.name for kind in KV_TYPES.values() if kind.gpu_kind is not None)
MAX_HEAD_DIM = 512


def reject(problem: Problem) -> str | None:
    """Why the Triton kernels reject the pages of a problem; ``None``: they accept them."""
    for name in problem.kv_dtype.split("/"):
        if name not in _NAMES:
            return f"KV pages of {name}: expected {', '.join(_NAMES)}"
    if problem.value_dim:
        return f"values of {problem.value_dim} dimensions: expected {problem.head_dim}, as keys"
    if problem.head_dim % 8 or not 0 < problem.head_dim <= MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim}: expected a multiple of 8 up to {MAX_HEAD_DIM}"
    return None


@dataclass(frozen=True, slots=True)
class PageSide:
    """The keys or the values of a layer, as kernels take them.

    ``codes`` and ``scales`` (the codes again if there are none); ``strides`` of page, head and
    slot, then of page and group of the scales. ``kind`` is one of the numbers above. A head has
    ``groups`` scales, each for ``group`` dimensions, a power of two (0: one for all of them).
    """

    codes: Tensor
    scales: Tensor
    strides: tuple[int, ...]
    kind: int
    groups: int
    group: int
    mixed: bool


def page_sides(pages: KVPages, head_dim: int) -> tuple[PageSide, PageSide]:
    """Keys and values.

    :raises KernelError: unless the pages are as ``KVPages`` and this module say.
    """
    if pages.k.shape[:3] != pages.v.shape[:3]:
        raise KernelError(
            f"KV pages: k {list(pages.k.shape)} and v {list(pages.v.shape)} do not agree"
        )
    expect_on_device("KV pages", pages.k, pages.v, pages.k_scale, pages.v_scale)
    return (
        _side(pages.k_type, pages.k, pages.k_scale, head_dim),
        _side(pages.v_type, pages.v, pages.v_scale, head_dim),
    )


def key_side(pages: KVPages, head_dim: int) -> PageSide:
    """Keys alone, those of latent pages.

    :raises KernelError: see :func:`page_sides`.
    """
    return _side(pages.k_type, pages.k, pages.k_scale, head_dim)


def _side(kv_type: KVType, codes: Tensor, scales: Tensor | None, head_dim: int) -> PageSide:
    kind, mixed, width = kv_type.gpu_kind, kv_type.hadamard, head_dim // kv_type.packing
    dtype = kv_type.storage_dtype
    if codes.dtype != dtype or codes.shape[3] != width or codes.stride(3) != 1 or kind is None:
        raise KernelError(
            f"KV pages of {kv_type.name}: expected {dtype} [pages, heads, page_size, {width}], "
            f"[page_size, {width}] in the memory of a page, found {codes.dtype} "
            f"{list(codes.shape)} with strides {codes.stride()}"
        )
    if not kv_type.scale:
        return PageSide(codes, codes, (*codes.stride()[:3], 0, 0), kind, 1, 0, mixed)
    count, heads, slots, _ = codes.shape
    groups = 0 if scales is None else scales.shape[1] // heads
    if scales is None or not groups or scales.shape != (count, heads * groups, slots):
        found = None if scales is None else list(scales.shape)
        raise KernelError(
            f"KV pages: expected scales [{count}, {heads} * groups, {slots}], found {found}"
        )
    group = scale_group(head_dim, groups) if groups > 1 else 0
    if scales.dtype != kv_type.scale_dtype or scales.stride(2) != 1 or group & (group - 1):
        raise KernelError(
            f"KV pages: expected contiguous {kv_type.scale_dtype} scales, one for a power of two "
            f"of dimensions, found {scales.dtype} with strides {scales.stride()} for {group}"
        )
    if kind in (E4M3.value, E5M2.value):
        codes = codes.view(torch.uint8)
    strides = (*codes.stride()[:3], *scales.stride()[:2])
    return PageSide(codes, scales, strides, kind, groups, group, mixed)


def hadamard_block(head_dim: int) -> int:
    """The size of the Hadamard matrix for a head: see ``reference/page_codes.py``."""
    return head_dim & -head_dim
