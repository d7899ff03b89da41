"""KV pages for the native kernels: checks, then pointers and strides."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.page_args import PageLevel, PageSide
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.kv_types import KV_TYPES, KVType, scale_group
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.tiers import MAX_TIERS, TIER_PAGE_SIZE
from sdk.kernels.lazy_torch import Tensor, torch

_NAMES = tuple(kind.name for kind in KV_TYPES.values() if kind.cpu_element is not None)
_INTEGERS = tuple(KV_TYPES[name].cpu_element for name in ("int16", "int8", "int4"))
_MAX_HEAD_DIM = 576
#: Products with integer codes are exact for so many dimensions that share a scale.
_MAX_SCALE_GROUP = 512


def reject(problem: Problem) -> str | None:
    """Why the native kernels reject the pages of a problem; ``None``: they accept them."""
    for name in problem.kv_dtype.replace(">", "/").split("/"):
        if name not in _NAMES:
            return f"KV pages of {name}: expected {', '.join(_NAMES)}"
    widths = {"head_dim": problem.head_dim, "value_dim": problem.value_dim or problem.head_dim}
    for name, width in widths.items():
        if width % 8 or not 0 < width <= _MAX_HEAD_DIM:
            return f"{name} {width}: expected a multiple of 8 up to {_MAX_HEAD_DIM}"
    if problem.value_dim and ">" in problem.kv_dtype:
        return (
            f"values of {problem.value_dim} dimensions in pages of several tiers: expected "
            f"{problem.head_dim}, as keys have"
        )
    return None


def inner_contiguous(x: Tensor, dtype: torch.dtype, what: str) -> None:
    """:raises KernelError: unless ``x`` is on the CPU, of ``dtype``, with a last stride of 1."""
    strided = x.numel() > 0 and x.stride(-1) != 1  # numpy's empty arrays have strides of 0
    if x.dtype != dtype or x.device.type != "cpu" or strided:
        raise KernelError(
            f"{what}: expected {dtype} on cpu with a contiguous last dimension, "
            f"found {x.dtype} on {x.device} with strides {x.stride()}"
        )


def check_pages(pages: KVPages, kv_heads: int, head_dim: int, value_dim: int | None = None) -> None:
    """``value_dim``: of values, default ``head_dim``; of latent pages a part of it.

    :raises KernelError: unless the pages are as ``KVPages`` says, for this head shape.
    """
    k, v = pages.k, pages.v
    if k.shape[:3] != v.shape[:3]:
        raise KernelError(f"KV pages: k {list(k.shape)} and v {list(v.shape)} do not agree")
    stored = 0 if pages.latent else head_dim if value_dim is None else value_dim
    if pages.latent and (value_dim is None or not 0 < value_dim <= head_dim):
        raise KernelError(
            f"latent KV pages: expected values of 1 to {head_dim} dimensions, found {value_dim}"
        )
    for x, kind, wide in ((k, pages.k_type, head_dim), (v, pages.v_type, stored)):
        width = wide // kind.packing
        if x.shape[1] != kv_heads or x.shape[3] != width or x.dtype != kind.storage_dtype:
            raise KernelError(
                f"KV pages of {kind.name}: expected {kind.storage_dtype} [pages, {kv_heads}, "
                f"page_size, {width}], found {x.dtype} {list(x.shape)}"
            )
    if stored:
        inner_contiguous(v, v.dtype, "KV pages")
    if k.device.type != "cpu" or (k.stride(2) != 1 and k.shape[2] > 1):
        raise KernelError(
            "KV pages: expected keys on cpu, [head_dim, page_size] in the memory of a page, "
            f"found strides {k.stride()} on {k.device}"
        )
    _check_scale(pages.k_type, k, pages.k_scale, head_dim)
    if stored:
        _check_scale(pages.v_type, v, pages.v_scale, stored)
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


def _check_scale(kind: KVType, x: Tensor, scale: Tensor | None, head_dim: int) -> None:
    if not kind.scale:
        if scale is not None:
            raise KernelError(
                f"KV pages of {kind.name}: expected no scales, found {list(scale.shape)}"
            )
        return
    pages, heads, slots = x.shape[:3]
    groups = 0 if scale is None or scale.dim() != 3 else scale.shape[1] // heads
    if scale is None or not groups or scale.shape != (pages, heads * groups, slots):
        found = None if scale is None else list(scale.shape)
        raise KernelError(
            f"KV pages: expected scales [{pages}, a multiple of {heads}, {slots}], found {found}"
        )
    inner_contiguous(scale, kind.scale_dtype, "KV scales")
    group = scale_group(head_dim, groups)
    if -(-head_dim // group) != groups:
        raise KernelError(
            f"KV pages: {groups} scales do not fit a head of {head_dim} in groups of {group}"
        )
    if kind.cpu_element in _INTEGERS and group > _MAX_SCALE_GROUP:
        raise KernelError(
            f"KV pages of {kind.name}: expected a scale for at most {_MAX_SCALE_GROUP} dimensions, "
            f"found one for {group}"
        )


def check_levels(
    pages: KVPages, kv_heads: int, head_dim: int, value_dim: int | None = None
) -> None:
    """:func:`check_pages` for all tiers; several tiers must be those of one KV cache."""
    levels = pages.tiers
    if len(levels) > 1 and (
        len(levels) > MAX_TIERS
        or any(level.page_size != TIER_PAGE_SIZE for level in levels)
        or any(level.k.shape[0] != pages.k.shape[0] << i for i, level in enumerate(levels))
    ):
        found = [list(level.k.shape) for level in levels]
        raise KernelError(
            f"KV pages: expected at most {MAX_TIERS} levels of pages of {TIER_PAGE_SIZE}, each "
            f"twice as many pages as the level above, found {found}"
        )
    for level in levels:
        check_pages(level, kv_heads, head_dim, value_dim)


def page_sides(pages: KVPages) -> PageLevel:
    """Keys and values as the native kernels take them; keys twice if the pages are latent."""
    k, v = pages.k, pages.v
    keys = _side(k, pages.k_scale, pages.k_type, k.stride(3), pages.k_mixed)
    if pages.latent:
        return PageLevel(keys, keys)
    return PageLevel(keys, _side(v, pages.v_scale, pages.v_type, v.stride(2), pages.v_mixed))


def _side(x: Tensor, scale: Tensor | None, kind: KVType, step: int, mixed: bool) -> PageSide:
    element, strides = kind.cpu_element, x.stride()
    if scale is None:
        return PageSide(x.data_ptr(), None, *strides[:2], step, 0, 0, element, 0, mixed)
    group = scale_group(x.shape[3] * kind.packing, scale.shape[1] // x.shape[1])
    scales = scale.stride()[:2]
    return PageSide(
        x.data_ptr(), scale.data_ptr(), *strides[:2], step, *scales, element, group, mixed
    )
