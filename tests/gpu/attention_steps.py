"""Steps of paged attention with random pages, and what a softmax in float64 makes of them.

Triton's interpreter takes about 3 ms for a tile of keys, so contexts are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.gpu.attention import Attention
from sdk.kernels.kv.kv_types import KV_ALIASES, KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch

#: What 16-bit weights of the values leave of exactness, beside the largest value of about 3.
ROUNDED = {"float32": 2e-6, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Step:
    """Requests of (context, new tokens) with their pages filled, and their queries."""

    batch: AttentionBatch
    pages: KVPages
    q: Tensor

    def run(
        self,
        *,
        exact: bool = False,
        fixed: bool = False,
        programs: int = 8,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """``[T, heads, head_dim]``."""
        out = torch.full((self.q.shape[0], self.q[0].numel()), float("nan"))
        settings: dict[str, Any] = {"scale": 0.2, "window": None, "softcap": None} | options
        Attention(exact, programs=programs, fixed=fixed).run(
            self.q, self.pages, self.batch, **settings, sinks=sinks, slopes=slopes, out=out
        )
        return out.view(self.q.shape)


def some_scales(codes: Tensor, groups: int, size: float, random: torch.Generator) -> Tensor:
    """``[pages, heads * groups, slots]``: float16, or scale and zero of int4."""
    pages, heads, slots, _ = codes.shape
    shape = (pages, heads * groups, slots)
    scale = ((torch.rand(shape, generator=random) + 0.5) * size).half()
    if codes.dtype != torch.uint8:
        return scale
    bits = scale.view(torch.int16).to(torch.int32) >> 7
    return (torch.randint(90, 150, shape, generator=random) << 8 | bits).to(torch.int16)


def make_side(
    shape: tuple[int, ...], dtype: str, groups: int, random: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Keys or values ``shape`` of about 1 in size, pages apart from one another."""
    x = torch.randn(shape[0], 3, *shape[1:], generator=random)[:, 1]
    if dtype == "int8":
        codes = (x * 40).clamp(-127, 127).to(torch.int8)
        return codes, some_scales(codes, groups, 0.025, random)
    if dtype.startswith("float8"):
        codes = (x * 100).to(getattr(torch, dtype))
        return codes, some_scales(codes, groups, 0.01, random)
    if dtype == "int4":
        half = (*shape[:3], shape[3] // 2)
        codes = torch.randint(0, 256, half, generator=random).to(torch.uint8)
        return codes, some_scales(codes, groups, 0.2, random)
    return x.to(getattr(torch, dtype)), None


def decoded(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Float64 ``[pages, heads, slots, head_dim]``, as ``gpu/pages.py`` says."""
    if scales is None:
        return codes.double()
    if codes.dtype == torch.uint8:
        codes = torch.cat([codes & 15, codes >> 4], dim=3)
    x = codes.double()
    pages, heads, slots, width = x.shape
    groups = scales.shape[1] // heads
    size = -(-width // (32 * groups)) * 32
    wide = scales.view(pages, heads, groups, slots).transpose(2, 3)
    wide = wide.repeat_interleave(size, dim=3)[..., :width]
    if scales.dtype == torch.float16:
        return x * wide.double()
    step = ((wide.to(torch.int32) & 255) << 7).to(torch.int16).view(torch.float16)
    return step.double() * (x - (wide.to(torch.int32) >> 8 & 255) / 16)


def make_step(
    requests: Sequence[tuple[int, int]],
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: str = "float32",
    shared: int = 0,
    groups: int = 1,
) -> Step:
    """Pages in random order, unused slots NaN; ``shared`` tokens of all in the same pages.

    ``dtype``: of keys and values, or ``keys/values``.
    """
    random = torch.Generator().manual_seed(len(requests) + head_dim)
    common = shared // page_size
    counts = [-(-context // page_size) for context, _ in requests]
    order = torch.randperm(sum(counts) + 2, generator=random).tolist()
    first = [order.pop() for _ in range(common)]
    names = dtype.split("/")
    shape = (sum(counts) + 2, kv_heads, page_size, head_dim)
    (k, k_scale), (v, v_scale) = (
        make_side(shape, name, groups, random) for name in (names[0], names[-1])
    )
    unused = torch.ones(shape[0], page_size, dtype=torch.bool)
    tables, starts = [], [0]
    for (context, new), count in zip(requests, counts, strict=True):
        own = first + [order.pop() for _ in range(count - common)]
        tables.append(own + [0] * (max(counts) - count))
        starts.append(starts[-1] + new)
        for token in range(context):
            unused[own[token // page_size], token % page_size] = False
    for codes, scale in ((k, k_scale), (v, v_scale)):
        nan = float("nan") if scale is None or scale.dtype == torch.float16 else 255
        target = codes.transpose(1, 2) if scale is None else scale.transpose(1, 2)
        target[unused] = nan
    q = torch.randn(starts[-1], heads + 1, head_dim, generator=random)[:, :heads]  # strided
    batch = AttentionBatch(
        positions=torch.zeros(starts[-1], dtype=torch.int64),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([c for c, _ in requests], dtype=torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.zeros(starts[-1], dtype=torch.int64),
        page_size=page_size,
        max_query_len=max(new for _, new in requests),
        max_context_len=max(c for c, _ in requests),
        shared_len=torch.tensor([shared], dtype=torch.int32) if shared else None,
    )
    k_type, v_type = (KV_TYPES[KV_ALIASES.get(name, name)] for name in (names[0], names[-1]))
    return Step(batch, KVPages(k, v, k_type, v_type, k_scale, v_scale), q)


def hadamard(size: int) -> Tensor:
    """Orthonormal, in blocks of the largest power of two within ``size``."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < (size & -size):
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
    return torch.block_diag(*[block / block.shape[0] ** 0.5] * (size // block.shape[0]))


def expected(
    step: Step,
    *,
    scale: float = 0.2,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    causal: bool = True,
    chunked: bool = False,
    ahead: Tensor | None = None,
) -> Tensor:
    """The definition, token by token and head by head, in float64."""
    pages, batch = step.pages, step.batch
    k, v = decoded(pages.k, pages.k_scale), decoded(pages.v, pages.v_scale)
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    group = step.q.shape[1] // k.shape[1]
    for r, length in enumerate(batch.context_len.tolist()):
        start, end = batch.query_start[r : r + 2].tolist()
        for token in range(start, end):
            last = length - (end - token)
            first = 0 if window is None else max(0, last - window + 1)
            if chunked and window is not None:
                first = last // window * window
            stop = last + 1 if causal else min(length, last + (window or length))
            if ahead is not None:
                stop = min(length, stop + int(ahead[token]))
            places = [(int(batch.page_table[r, t // batch.page_size]), t % batch.page_size)
                      for t in range(first, stop)]  # fmt: skip
            for head in range(step.q.shape[1]):
                keys = torch.stack([k[page, head // group, slot] for page, slot in places])
                values = torch.stack([v[page, head // group, slot] for page, slot in places])
                score = keys @ step.q[token, head].double() * scale
                if softcap is not None:
                    score = torch.tanh(score / softcap) * softcap
                if slopes is not None:
                    score = score - slopes[head] * (torch.arange(first, stop) - last).abs()
                if sinks is not None:
                    score = torch.cat([score, sinks[head].double()[None]])
                weights = score.softmax(0)[: len(values)]
                out[token, head] = weights @ values
    mixed = pages.v.dtype in (torch.int8, torch.uint8)
    return out @ hadamard(out.shape[2]) if mixed else out


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)


def alone(step: Step, request: int) -> Step:
    """One request of a step as a step of its own."""
    start, end = step.batch.query_start[request : request + 2].tolist()
    length = int(step.batch.context_len[request])
    batch = replace(
        step.batch,
        positions=step.batch.positions[start:end],
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        context_len=step.batch.context_len[request : request + 1],
        page_table=step.batch.page_table[request : request + 1],
        slots=step.batch.slots[start:end],
        max_query_len=end - start,
        max_context_len=length,
        shared_len=None,
    )
    return Step(batch, step.pages, step.q[start:end])
