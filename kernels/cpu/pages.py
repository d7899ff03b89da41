"""KV pages as the native kernels take them: checked, then pointers and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import ELEMENT_TYPES
from sdk.kernels.cpu.page_args import PageLevel, PageSide
from sdk.kernels.errors import KernelError
from sdk.kernels.kv_pages import KVPages, scale_group
from sdk.kernels.ladder import LADDER_PAGE_SIZE, MAX_LEVELS

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: kI4, where the codes of two dimensions share a byte.
_NIBBLES = 10
_PAGE_TYPES = {
    **{dtype: ELEMENT_TYPES[dtype] for dtype in _FLOATS},
    torch.int8: ELEMENT_TYPES[torch.int8],
    torch.float8_e4m3fn: ELEMENT_TYPES[torch.float8_e4m3fn],
    torch.float8_e5m2: ELEMENT_TYPES[torch.float8_e5m2],
    torch.uint8: _NIBBLES,
}
_NAMES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")
_MAX_HEAD_DIM = 256


def reject(problem: Problem) -> str | None:
    """Why the native kernels decline the pages of a problem."""
    for name in problem.kv_dtype.replace(">", "/").split("/"):
        if name not in _NAMES:
            return f"KV pages of {name}: expected {', '.join(_NAMES)}"
    if problem.head_dim % 8 or not 0 < problem.head_dim <= _MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim}: expected a multiple of 8 up to {_MAX_HEAD_DIM}"
    return None


def inner_contiguous(x: Tensor, dtype: torch.dtype, what: str) -> None:
    """:raises KernelError: unless ``x`` is on the CPU, of ``dtype``, its last stride 1."""
    if x.dtype != dtype or x.device.type != "cpu" or x.stride(-1) != 1:
        raise KernelError(
            f"{what}: expected {dtype} on cpu with a contiguous last dimension, "
            f"found {x.dtype} on {x.device} with strides {x.stride()}"
        )


def check_pages(pages: KVPages, kv_heads: int, head_dim: int) -> None:
    """:raises KernelError: unless the pages are what ``KVPages`` says, for this head shape."""
    k, v = pages.k, pages.v
    if k.shape[:3] != v.shape[:3]:
        raise KernelError(f"KV pages: k {list(k.shape)} and v {list(v.shape)} do not agree")
    for x in (k, v):
        wide = head_dim // 2 if x.dtype == torch.uint8 else head_dim
        if x.shape[1] != kv_heads or x.shape[3] != wide or x.dtype not in _PAGE_TYPES:
            raise KernelError(
                f"KV pages: expected [pages, {kv_heads}, page_size, {wide}] of a known type, "
                f"found {x.dtype} {list(x.shape)}"
            )
    inner_contiguous(v, v.dtype, "KV pages")
    if k.device.type != "cpu" or (k.stride(2) != 1 and k.shape[2] > 1):
        raise KernelError(
            "KV pages: expected keys on cpu that lie [head_dim, page_size] in a page, "
            f"found strides {k.stride()} on {k.device}"
        )
    for x, scale in ((k, pages.k_scale), (v, pages.v_scale)):
        _check_scale(x, scale, head_dim)
    centre = pages.k_centre
    if centre is not None and (
        centre.dtype != torch.float32
        or centre.shape != (kv_heads, head_dim)
        or not centre.is_contiguous()
    ):
        raise KernelError(
            f"KV pages: expected a contiguous float32 centre [{kv_heads}, {head_dim}], "
            f"found {centre.dtype} {list(centre.shape)}"
        )


def _check_scale(x: Tensor, scale: Tensor | None, head_dim: int) -> None:
    if x.dtype in _FLOATS:
        if scale is not None:
            raise KernelError(f"KV pages: {x.dtype} has no scales, found {list(scale.shape)}")
        return
    pages, heads, slots = x.shape[:3]
    groups = 0 if scale is None or scale.dim() != 3 else scale.shape[1] // heads
    if scale is None or not groups or scale.shape != (pages, heads * groups, slots):
        found = None if scale is None else list(scale.shape)
        raise KernelError(
            f"KV pages: expected scales [{pages}, a multiple of {heads}, {slots}], found {found}"
        )
    inner_contiguous(scale, torch.int16 if x.dtype == torch.uint8 else torch.float16, "KV scales")
    group = scale_group(head_dim, groups)
    if -(-head_dim // group) != groups:
        raise KernelError(
            f"KV pages: {groups} scales do not fit a head of {head_dim} in groups of {group}"
        )


def check_levels(pages: KVPages, kv_heads: int, head_dim: int) -> None:
    """:func:`check_pages` of all levels, and that they are those of one ladder."""
    levels = pages.levels
    if len(levels) > 1 and (
        len(levels) > MAX_LEVELS
        or any(level.page_size != LADDER_PAGE_SIZE for level in levels)
        or any(level.k.shape[0] != pages.k.shape[0] << i for i, level in enumerate(levels))
    ):
        found = [list(level.k.shape) for level in levels]
        raise KernelError(
            f"KV pages: expected at most {MAX_LEVELS} levels of pages of {LADDER_PAGE_SIZE}, each "
            f"twice as many as above, found {found}"
        )
    for level in levels:
        check_pages(level, kv_heads, head_dim)


def page_sides(pages: KVPages) -> PageLevel:
    """Keys and values."""
    return PageLevel(
        _side(pages, pages.k, pages.k_scale, pages.k.stride(3), pages.k_mixed),
        _side(pages, pages.v, pages.v_scale, pages.v.stride(2), pages.v_mixed),
    )


def _side(pages: KVPages, x: Tensor, scale: Tensor | None, step: int, mixed: bool) -> PageSide:
    kind, strides = _PAGE_TYPES[x.dtype], x.stride()
    if scale is None:
        return PageSide(x.data_ptr(), None, *strides[:2], step, 0, 0, kind, 0, mixed)
    group = scale_group(pages.head_dim, scale.shape[1] // x.shape[1])
    scales = scale.stride()[:2]
    return PageSide(x.data_ptr(), scale.data_ptr(), *strides[:2], step, *scales, kind, group, mixed)
