"""KV pages as the native kernels take them: checked, then pointers and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import KVPages
from sdk.kernels.registry import Problem

_PAGE_TYPES = ("float32", "float16", "bfloat16", "int8")
_MAX_HEAD_DIM = 256


def reject(problem: Problem) -> str | None:
    """Why the native kernels decline the pages of a problem."""
    if problem.kv_dtype not in _PAGE_TYPES:
        return f"KV pages of {problem.kv_dtype}: expected {', '.join(_PAGE_TYPES)}"
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
    if k.shape != v.shape or k.dtype != v.dtype:
        raise KernelError(
            f"KV pages: k {list(k.shape)} {k.dtype} and v {list(v.shape)} {v.dtype} do not agree"
        )
    if k.shape[1] != kv_heads or k.shape[3] != head_dim:
        raise KernelError(
            f"KV pages: expected [pages, {kv_heads}, page_size, {head_dim}], found {list(k.shape)}"
        )
    inner_contiguous(v, k.dtype, "KV pages")
    if k.device.type != "cpu" or (k.stride(2) != 1 and k.shape[2] > 1):
        raise KernelError(
            "KV pages: expected keys on cpu that lie [head_dim, page_size] in a page, "
            f"found strides {k.stride()} on {k.device}"
        )
    if k.dtype == torch.int8:
        _check_scales(pages)


def _check_scales(pages: KVPages) -> None:
    shape = pages.k.shape[:3]
    for scale in (pages.k_scale, pages.v_scale):
        if scale is None or scale.shape != shape:
            found = None if scale is None else list(scale.shape)
            raise KernelError(f"KV pages: expected scales {list(shape)}, found {found}")
        inner_contiguous(scale, torch.float16, "KV scales")
    assert pages.k_scale is not None and pages.v_scale is not None
    if pages.k_scale.stride() != pages.v_scale.stride():
        raise KernelError(
            f"KV pages: the scales' strides {pages.k_scale.stride()} and "
            f"{pages.v_scale.stride()} do not agree"
        )


def page_pointers(pages: KVPages) -> tuple[int | None, ...]:
    """Keys, values and their scales."""
    scales = (pages.k_scale, pages.v_scale)
    return (
        pages.k.data_ptr(),
        pages.v.data_ptr(),
        *(None if scale is None else scale.data_ptr() for scale in scales),
    )


def page_strides(pages: KVPages) -> tuple[int, ...]:
    """The strides from ``k_page`` to ``scale_head``, in elements, and the number of pages."""
    k, scale = pages.k.stride(), pages.k_scale
    scale_strides = (0, 0) if scale is None else scale.stride()[:2]
    return (k[0], k[1], k[3], *pages.v.stride()[:3], *scale_strides, pages.k.shape[0])
