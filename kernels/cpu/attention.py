"""Rotary embedding with the KV write, and paged attention: ``native/attention.hpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from sdk.kernels.batch import AttentionBatch
from sdk.kernels.cpu.elementwise import floats
from sdk.kernels.cpu.library import (
    ELEMENT_TYPES,
    AttentionArgs,
    Engine,
    OpKind,
    PlacesArgs,
    RopeArgs,
)
from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import KVPages
from sdk.kernels.registry import Problem

_PAGE_TYPES = ("float32", "float16", "bfloat16")
_MAX_HEAD_DIM = 256


def _reject(problem: Problem) -> str | None:
    if problem.kv_dtype not in _PAGE_TYPES:
        return f"KV pages of {problem.kv_dtype}: expected {', '.join(_PAGE_TYPES)}"
    if problem.head_dim % 8 or not 0 < problem.head_dim <= _MAX_HEAD_DIM:
        return f"head_dim {problem.head_dim}: expected a multiple of 8 up to {_MAX_HEAD_DIM}"
    return None


class RopeAndCache:
    """See :meth:`sdk.kernels.ops.Ops.rope_and_cache`."""

    name = "cpu.rope_and_cache"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, problem: Problem) -> str | None:
        return _reject(problem)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        pages: KVPages,
    ) -> None:
        tokens, kv_heads, head_dim = k.shape
        half = cos.shape[1]
        if v.shape != k.shape or q.shape[0] != tokens or q.shape[2] != head_dim:
            raise KernelError(
                f"rope: q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} do not agree"
            )
        if cos.shape != (tokens, half) or sin.shape != cos.shape or 2 * half > head_dim:
            raise KernelError(
                f"rope: expected cos and sin [{tokens}, at most {head_dim // 2}], "
                f"found {list(cos.shape)} and {list(sin.shape)}"
            )
        if batch.slots.shape != (tokens,) or batch.slots.dtype != torch.int64:
            raise KernelError(f"rope: expected int64 slots [{tokens}], found {batch.slots.shape}")
        for name, x in (("q", q), ("k", k), ("v", v), ("cos", cos), ("sin", sin)):
            _inner_contiguous(x, torch.float32, f"rope {name}")
        _check_pages(pages, kv_heads, head_dim)
        slots = batch.slots.contiguous()
        args = RopeArgs(
            *(x.data_ptr() for x in (q, k, v, cos, sin, slots, pages.k, pages.v)),
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            cos.stride(0),
            sin.stride(0),
            *pages.k.stride()[:3],
            *pages.v.stride()[:3],
            q.shape[1],
            kv_heads,
            head_dim,
            half,
            pages.page_size,
            ELEMENT_TYPES[pages.k.dtype],
        )
        self._engine.run(OpKind.ROPE, args, tokens, "rope_and_cache")


class Attention:
    """See :meth:`sdk.kernels.ops.Ops.attention`."""

    name = "cpu.attention"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, problem: Problem) -> str | None:
        return _reject(problem)

    def run(
        self,
        q: Tensor,
        pages: KVPages,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        _, heads, head_dim = q.shape
        kv_heads = pages.k.shape[1]
        _inner_contiguous(q, torch.float32, "attention q")
        _check_pages(pages, kv_heads, head_dim)
        if sinks is not None:
            sinks = floats(sinks, "attention sinks")
            if sinks.shape != (heads,):
                raise KernelError(f"attention: expected sinks [{heads}], found {list(sinks.shape)}")
        if window is not None and window < 1:
            raise KernelError(f"attention: expected a window of at least 1, found {window}")
        index = [batch.query_start, batch.context_len, batch.page_table]
        for i, x in enumerate(index):
            if x.dtype != torch.int32:
                raise KernelError(f"attention: expected int32 index tensors, found {x.dtype}")
            index[i] = x.contiguous()
        args = AttentionArgs(
            *(x.data_ptr() for x in (q, out, pages.k, pages.v, *index)),
            None if sinks is None else sinks.data_ptr(),
            None,
            *q.stride()[:2],
            index[2].shape[1],
            *pages.k.stride()[:3],
            *pages.v.stride()[:3],
            batch.num_requests,
            heads,
            kv_heads,
            head_dim,
            pages.page_size,
            ELEMENT_TYPES[pages.k.dtype],
            window or 0,
            scale,
            softcap or 0.0,
            0,
            None,
        )
        self._engine.run(OpKind.ATTENTION, args, batch.num_requests, "attention")


class Places:
    """See :meth:`sdk.kernels.ops.Ops.find_places`."""

    name = "cpu.find_places"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, batch: AttentionBatch) -> None:
        args = PlacesArgs(
            batch.query_start.data_ptr(),
            batch.context_len.data_ptr(),
            batch.page_table.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            batch.page_table.stride(0) if batch.num_requests > 1 else batch.page_table.shape[1],
            batch.num_tokens,
            batch.page_size,
        )
        self._engine.run(OpKind.PLACES, args, batch.num_requests, "find_places")


def _inner_contiguous(x: Tensor, dtype: torch.dtype, what: str) -> None:
    if x.dtype != dtype or x.device.type != "cpu" or x.stride(-1) != 1:
        raise KernelError(
            f"{what}: expected {dtype} on cpu with a contiguous last dimension, "
            f"found {x.dtype} on {x.device} with strides {x.stride()}"
        )


def _check_pages(pages: KVPages, kv_heads: int, head_dim: int) -> None:
    if pages.k.shape != pages.v.shape or pages.k.dtype != pages.v.dtype:
        raise KernelError(
            f"KV pages: k {list(pages.k.shape)} {pages.k.dtype} and "
            f"v {list(pages.v.shape)} {pages.v.dtype} do not agree"
        )
    if pages.k.shape[1] != kv_heads or pages.k.shape[3] != head_dim:
        raise KernelError(
            f"KV pages: expected [pages, {kv_heads}, page_size, {head_dim}], "
            f"found {list(pages.k.shape)}"
        )
    _inner_contiguous(pages.k, pages.k.dtype, "KV pages")
    _inner_contiguous(pages.v, pages.k.dtype, "KV pages")
