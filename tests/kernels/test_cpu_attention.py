"""Native paged attention and rotary embedding, at every SIMD level, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.batch import AttentionBatch
from sdk.kernels.cpu import CpuBackend, open_backend
from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import KVPages
from sdk.kernels.reference.attention import Attention, RopeAndCache
from sdk.kernels.registry import Problem

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Step:
    """Requests of (context, new tokens) with their pages filled and their queries."""

    batch: AttentionBatch
    pages: KVPages
    q: Tensor


def make_batch(requests: Sequence[tuple[int, int]], page_size: int) -> tuple[AttentionBatch, int]:
    """Pages are handed out in random order; also the number of pages."""
    counts = [-(-context // page_size) for context, _ in requests]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3)).tolist()
    positions, slots, starts, tables = [], [], [0], []
    for (context, new), count in zip(requests, counts, strict=True):
        pages = [order.pop() for _ in range(count)]
        tables.append(pages + [0] * (max(counts) - count))
        positions += range(context - new, context)
        slots += [
            pages[t // page_size] * page_size + t % page_size for t in range(context - new, context)
        ]
        starts.append(starts[-1] + new)
    batch = AttentionBatch(
        positions=torch.tensor(positions),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([c for c, _ in requests], dtype=torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor(slots),
        page_size=page_size,
        max_query_len=max(new for _, new in requests),
        max_context_len=max(c for c, _ in requests),
    )
    return batch, sum(counts) + 2


def make_step(
    requests: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
) -> Step:
    """Keys and values depend on the request and the position only; unused slots hold NaN."""
    batch, num_pages = make_batch(requests, page_size)
    shape = (num_pages, kv_heads, page_size, head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    queries = []
    for r, (context, new) in enumerate(requests):
        random = torch.Generator().manual_seed(100 + r)
        rows = torch.randn(3, 256, 2, 8, generator=random)[:, :context]
        rows = rows.repeat(1, 1, heads, -(-head_dim // 8))[..., :head_dim]
        rows = rows * (1 + torch.arange(2 * heads).view(-1, 1) / 7)
        at = torch.arange(context)
        page = batch.page_table[r].long()[at // page_size]
        k[page, :, at % page_size] = rows[0, :, :kv_heads].to(dtype)
        v[page, :, at % page_size] = rows[1, :, :kv_heads].to(dtype)
        queries.append(rows[2, context - new :, :heads])
    return Step(batch, KVPages(k, v), torch.cat(queries).contiguous())


def attend(kernel: Any, step: Step, **options: Any) -> Tensor:
    tokens, heads, head_dim = step.q.shape
    out = torch.full((tokens, heads * head_dim), float("nan"))
    settings = {"window": None, "softcap": None, "sinks": None, **options}
    kernel.run(step.q, step.pages, step.batch, head_dim**-0.5, out=out, **settings)
    return out


def expected(step: Step, **options: Any) -> Tensor:
    """Float64, token by token, from the definition."""
    tokens, heads, head_dim = step.q.shape
    group = heads // step.pages.k.shape[1]
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float64)
    starts = step.batch.query_start.tolist()
    for r, context in enumerate(step.batch.context_len.tolist()):
        ids = torch.arange(context)
        page = step.batch.page_table[r].long()[ids // step.batch.page_size]
        k = step.pages.k[page, :, ids % step.batch.page_size].double().repeat_interleave(group, 1)
        v = step.pages.v[page, :, ids % step.batch.page_size].double().repeat_interleave(group, 1)
        for t in range(starts[r], starts[r + 1]):
            position = int(step.batch.positions[t])
            low = max(0, position + 1 - (options.get("window") or context))
            score = torch.einsum("hd,thd->ht", step.q[t].double(), k[low : position + 1])
            score = score * head_dim**-0.5
            if options.get("softcap"):
                score = torch.tanh(score / options["softcap"]) * options["softcap"]
            if options.get("sinks") is not None:
                score = torch.cat((score, options["sinks"].double().unsqueeze(1)), dim=1)
            weight = score.softmax(dim=1)[:, : position + 1 - low]
            out[t] = torch.einsum("ht,thd->hd", weight, v[low : position + 1])
    return out.view(tokens, -1)


MIXED = ((1, 1), (100, 1), (70, 70), (200, 17), (65, 64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "options"),
    [
        (9, 3, 64, 16, {}),
        (4, 4, 72, 7, {}),
        (8, 1, 128, 32, {"window": 20}),
        (4, 2, 256, 16, {"softcap": 3.0}),
        (6, 2, 8, 1, {"window": 70, "sinks": torch.linspace(-2, 4, 6)}),
    ],
)
def test_attention_matches_float64(
    backend: CpuBackend,
    cases: Any,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    options: dict[str, Any],
) -> None:
    (kernel,) = backend.implementations("attention")
    step = make_step(MIXED, heads, kv_heads, head_dim, page_size, dtype)
    assert cases.nmse(attend(kernel, step, **options), expected(step, **options)) < 1e-11


@pytest.mark.parametrize("options", [{}, {"window": 90}, {"softcap": 5.0}])
def test_chunks_batches_and_threads_do_not_change_a_bit(
    backend: CpuBackend, options: dict[str, Any]
) -> None:
    (kernel,) = backend.implementations("attention")
    whole = attend(kernel, make_step([(150, 150)], 6, 2, 64, 16, torch.float16), **options)
    single = open_backend("cpu", 1, backend.engine.level)
    (alone,) = single.implementations("attention")
    for chunks in ((1,) * 150, (64, 64, 22), (3, 140, 7)):
        end, parts = 0, []
        for new in chunks:
            end += new
            # the same request 0, now beside another one and with other pages
            step = make_step([(end, new), (33, 5)], 6, 2, 64, 8, torch.float16)
            parts.append(attend(alone if len(chunks) == 3 else kernel, step, **options)[:new])
        assert torch.equal(torch.cat(parts), whole)
    single.close()


def test_queries_may_be_views_of_a_fused_projection(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("attention")
    step = make_step([(40, 9)], 4, 2, 16, 16, torch.float32)
    fused = torch.zeros(9, 8, 16)
    fused[:, 2:6] = step.q
    assert torch.equal(attend(kernel, replace(step, q=fused[:, 2:6])), attend(kernel, step))


def test_a_batch_of_many_requests_matches_the_reference(backend: CpuBackend, cases: Any) -> None:
    (kernel,) = backend.implementations("attention")
    step = make_step([(i + 1, 1) for i in range(64)], 4, 2, 32, 16, torch.float32)
    pages = KVPages(*(torch.nan_to_num(x) for x in (step.pages.k, step.pages.v)))
    clean = replace(step, pages=pages)  # the reference multiplies stale slots by zero
    assert cases.nmse(attend(kernel, step), attend(Attention(), clean)) < 1e-11


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_cache_equals_the_reference_bit_for_bit(
    backend: CpuBackend, dtype: torch.dtype
) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    batch, num_pages = make_batch(MIXED, 16)
    tokens, heads, kv_heads, head_dim = batch.num_tokens, 6, 2, 40
    for rotary in (40, 24):
        results = []
        for run in (kernel.run, RopeAndCache().run):
            random = torch.Generator().manual_seed(0)
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=random)
            qkv[0, 5] = float("nan")
            qkv[:, -3] *= 1e6  # beyond float16
            q, k, v = (x.view(tokens, -1, head_dim) for x in qkv.split([240, 80, 80], dim=1))
            angle = torch.rand(tokens, rotary // 2, generator=random) * 6
            shape = (num_pages, kv_heads, 16, head_dim)
            pages = KVPages(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))
            run(q, k, v, angle.cos(), angle.sin(), batch, pages)
            results.append((qkv, pages.k.float(), pages.v.float()))
        for found, wanted in zip(*results, strict=True):
            assert torch.equal(found.isnan(), wanted.isnan())
            assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
        if dtype == torch.float16:
            assert results[0][2].nan_to_num().abs().max() == 65504


@pytest.mark.parametrize("op", ["attention", "rope_and_cache"])
def test_what_the_kernels_cannot_run_is_declined(backend: CpuBackend, op: str) -> None:
    (kernel,) = backend.implementations(op)
    reason = kernel.reject(Problem(op, head_dim=64, kv_dtype="int8"))
    assert reason == "KV pages of int8: expected float32, float16, bfloat16"
    for head_dim in (0, 12, 264):
        reason = kernel.reject(Problem(op, head_dim=head_dim, kv_dtype="float16"))
        assert reason == f"head_dim {head_dim}: expected a multiple of 8 up to 256"
    assert kernel.reject(Problem(op, head_dim=256, kv_dtype="bfloat16")) is None


def test_attention_refuses_arguments_that_disagree(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("attention")
    step = make_step([(4, 2)], 4, 2, 16, 16, torch.float32)
    with pytest.raises(KernelError, match=r"expected sinks \[4\], found \[3\]"):
        attend(kernel, step, sinks=torch.zeros(3))
    with pytest.raises(KernelError, match="expected a window of at least 1, found 0"):
        attend(kernel, step, window=0)
    with pytest.raises(KernelError, match=r"expected int32 index tensors, found torch\.int64"):
        batch = replace(step.batch, page_table=step.batch.page_table.long())
        attend(kernel, replace(step, batch=batch))
    with pytest.raises(KernelError, match=r"attention q: expected torch\.float32 on cpu"):
        attend(kernel, replace(step, q=step.q.double()))
    with pytest.raises(KernelError, match=r"KV pages: k .* do not agree"):
        attend(kernel, replace(step, pages=KVPages(step.pages.k, step.pages.v.half())))
    with pytest.raises(KernelError, match=r"KV pages: expected .* with a contiguous last"):
        swapped = step.pages.k.transpose(2, 3)
        attend(kernel, replace(step, pages=KVPages(swapped, swapped)))


def test_rope_refuses_arguments_that_disagree(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    step = make_step([(4, 2)], 4, 2, 16, 16, torch.float32)
    q, k, angle = torch.zeros(2, 4, 16), torch.zeros(2, 2, 16), torch.zeros(2, 8)
    with pytest.raises(KernelError, match=r"rope: q .* do not agree"):
        kernel.run(q, k, k[:, :1], angle, angle, step.batch, step.pages)
    with pytest.raises(KernelError, match=r"expected cos and sin \[2, at most 8\]"):
        kernel.run(q, k, k, torch.zeros(2, 9), torch.zeros(2, 9), step.batch, step.pages)
    with pytest.raises(KernelError, match=r"expected int64 slots \[2\]"):
        batch = replace(step.batch, slots=step.batch.slots[:1])
        kernel.run(q, k, k, angle, angle, batch, step.pages)
    with pytest.raises(KernelError, match="KV pages: expected"):
        pages = KVPages(step.pages.k[:, :1], step.pages.v[:, :1])
        kernel.run(q, k, k, angle, angle, step.batch, pages)
    with pytest.raises(KernelError, match=r"rope v: expected torch\.float32 on cpu"):
        kernel.run(q, k, k.double(), angle, angle, step.batch, step.pages)
