"""Latent pages, values of another width than keys, and products of heads: native and reference."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.backend import Problem
from sdk.kernels.cpu import CpuBackend, open_backend
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import QueryScale
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.attention import Attention as ReferenceAttention
from sdk.kernels.reference.page_codes import mixed, page_floats
from sdk.kernels.reference.rope import LatentRopeAndCache, RopeAndCache
from sdk.kernels.weights.layouts import Dense, Layout
from sdk.quant.caches import AttentionCache
from sdk.quant.spec import KVSpec
from tests.kernels.plain_kernels import plain_kernels

DTYPES = ("float32", "float16", "bfloat16", "int16", "int8", "fp8", "fp8_e5m2", "int4")
#: Integers are multiplied by queries and weights of 16 bits: see test_cpu_attention.py.
NMSE = dict.fromkeys(("int8", "int4"), 1e-8) | {"int16": 2e-8}


def make_pages(cache: AttentionCache, count: int, page_size: int, dtype: str) -> KVPages:
    """One layer's pages, every number of them NaN."""
    spec = KVSpec(1, cache.kv_heads, cache.key_dim, page_size, dtype, (cache,))
    pages = KVCache(spec, count).layers[0]
    for codes, scale in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        if scale is not None:
            scale.fill_(0xFF if scale.dtype == torch.int16 else float("nan"))
        elif codes.numel():
            codes.fill_(float("nan"))
    return pages


def make_batch(context: int, new: int, page_size: int, pages: int = 60) -> AttentionBatch:
    """One request whose ``pages`` are in descending order; page 0 is nobody's."""
    count = -(-context // page_size)
    table = torch.arange(pages - 1, pages - 1 - count, -1, dtype=torch.int32)[None]
    at = torch.arange(context - new, context)
    slots = table[0].long()[at // page_size] * page_size + at % page_size
    return AttentionBatch(
        positions=at,
        query_start=torch.tensor([0, new], dtype=torch.int32),
        context_len=torch.tensor([context], dtype=torch.int32),
        page_table=table,
        slots=slots,
        page_size=page_size,
        max_query_len=new,
        max_context_len=context,
    )


class LatentStep:
    """A text of ``context`` tokens: queries, latents and what turns, by position."""

    def __init__(self, context: int, heads: int, value_dim: int, width: int, half: int) -> None:
        random = torch.Generator().manual_seed(7)
        self.context, self.value_dim = context, value_dim
        self.q = torch.randn(context, heads, value_dim + width, generator=random)
        self.turned = torch.randn(context, heads, width + 8, generator=random)[..., 3 : width + 3]
        self.latent = 2 * torch.randn(context, 1, value_dim, generator=random)
        self.k = torch.randn(context, 1, width, generator=random)
        angle = torch.rand(context, half, generator=random) * 6
        self.cos, self.sin = angle.cos(), angle.sin()

    def run(
        self,
        write: Any,
        attend: Any,
        pages: KVPages,
        chunks: tuple[int, ...],
        scale: QueryScale | None = None,
        **options: Any,
    ) -> Tensor:
        """Attention of all tokens, written in ``chunks``."""
        found, begin = [], 0
        for new in chunks:
            part = slice(begin, begin + new)
            begin += new
            batch = make_batch(begin, new, pages.page_size)
            own = (x[part] for x in (self.turned, self.latent, self.k, self.cos, self.sin))
            q = self.q[part].clone()
            write.run(q, *own, batch, pages, scale)
            out = torch.full((new, q.shape[1] * self.value_dim), float("nan"))
            settings = {"window": None, "softcap": None, "sinks": None, "slopes": None, **options}
            attend.run(q, pages, batch, q.shape[2] ** -0.5, out=out, **settings)
            found.append(out)
        assert begin == self.context
        return torch.cat(found)


def kernels(backend: CpuBackend) -> tuple[Any, Any]:
    """The native operators that write latent pages and read them."""
    write, attend = ("latent_rope_and_cache", "attention")
    return plain_kernels(backend, write)[0], plain_kernels(backend, attend)[0]


def exact(step: LatentStep, pages: KVPages, scale: QueryScale | None, window: int) -> Tensor:
    """Attention over what the pages hold, in float64 and unmixed."""
    ids = make_batch(step.context, step.context, pages.page_size).page_table[0].long()
    keys = page_floats(pages, ids, step.value_dim)[0].double()[:, 0].flatten(0, 1)
    if pages.k_mixed:
        keys = mixed(keys, step.value_dim)
    keys = keys[: step.context]
    half, width = step.cos.shape[1], step.k.shape[2]
    q, turned = step.q.double(), step.turned.double()
    c, s = step.cos.double()[:, None], step.sin.double()[:, None]
    a, b, rest = turned.split((half, half, width - 2 * half), dim=-1)
    q = torch.cat((q[..., : step.value_dim], a * c - b * s, b * c + a * s, rest), dim=-1)
    at = torch.arange(step.context)
    if scale is not None:
        q = q * (1 + scale.beta * torch.log1p((at // scale.length).double()))[:, None, None]
    score = torch.einsum("qhd,td->hqt", q, keys) * q.shape[2] ** -0.5
    hidden = (at[None] > at[:, None]) | (at[None] <= at[:, None] - window)
    weight = score.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqt,td->qhd", weight, keys[:, : step.value_dim]).flatten(1)


SHAPES = [  # heads, value_dim, what turns, half of what rotates, page size
    (16, 512, 64, 32, 16),
    (4, 64, 32, 16, 32),
    (3, 40, 24, 8, 7),
    (20, 256, 32, 16, 128),
]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "value_dim", "width", "half", "page_size"), SHAPES)
def test_attention_over_latent_pages(
    backend: CpuBackend,
    heads: int,
    value_dim: int,
    width: int,
    half: int,
    page_size: int,
    dtype: str,
) -> None:
    step = LatentStep(150, heads, value_dim, width, half)
    cache = AttentionCache(1, value_dim + width, value_dim, latent=True)
    scale, window = (QueryScale(0.2, 40), 90) if heads == 3 else (None, 1000)
    options = {"window": window} if window < 1000 else {}
    pages = make_pages(cache, 60, page_size, dtype)
    found = step.run(*kernels(backend), pages, (149, 1), scale, **options)
    wanted = exact(step, pages, scale, window)
    error = (found - wanted).square().mean() / wanted.square().mean()
    assert error < NMSE.get(dtype, 1e-11)
    others = make_pages(cache, 60, page_size, dtype)
    again = step.run(LatentRopeAndCache(), ReferenceAttention(), others, (150,), scale, **options)
    ids = torch.arange(60 - 150 // page_size, 60)  # whole pages
    for one, other in zip(
        page_floats(pages, ids, value_dim), page_floats(others, ids, value_dim), strict=True
    ):
        assert (one - other).square().mean() < 1e-5 * other.square().mean()
    assert (again - wanted).square().mean() < 1e-5 * wanted.square().mean()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", ["float16", "int16", "int8", "fp8"])
@pytest.mark.parametrize(("heads", "value_dim", "width", "half", "page_size"), SHAPES[:3])
def test_chunks_and_threads_do_not_change_a_bit(
    backend: CpuBackend,
    heads: int,
    value_dim: int,
    width: int,
    half: int,
    page_size: int,
    dtype: str,
) -> None:
    step = LatentStep(290, heads, value_dim, width, half)
    cache = AttentionCache(1, value_dim + width, value_dim, latent=True)
    found = [
        step.run(*kernels(own), make_pages(cache, 60, page_size, dtype), chunks)
        for own in (backend, open_backend("cpu", 3, backend.runtime.level))
        for chunks in ((290,), (1, 130, 2, 156, 1))
    ]
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize("dtype", ["float32", "int16", "int8", "int4", "fp8/int4"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (24, 64)])
def test_values_may_have_another_width_than_keys(
    backend: CpuBackend, key_dim: int, value_dim: int, dtype: str
) -> None:
    """MiMo V2 has keys of 192 and values of 128 dimensions."""
    tokens, heads, kv_heads = 200, 6, 2
    random = torch.Generator().manual_seed(1)
    q = torch.randn(tokens, heads, key_dim, generator=random)
    k = torch.randn(tokens, kv_heads, key_dim, generator=random)
    v = torch.randn(tokens, kv_heads, value_dim, generator=random)
    angle = torch.rand(tokens, key_dim // 4, generator=random)
    cache = AttentionCache(kv_heads, key_dim, value_dim)
    batch, results = make_batch(tokens, tokens, 16), []
    native = (plain_kernels(backend, op)[0] for op in ("rope_and_cache", "attention"))
    for write, attend in (native, (RopeAndCache(), ReferenceAttention())):
        pages, turned = make_pages(cache, 60, 16, dtype), q.clone()
        write.run(turned, k, v, angle.cos(), angle.sin(), batch, pages)
        out = torch.full((tokens, heads * value_dim), float("nan"))
        attend.run(turned, pages, batch, 0.1, None, None, None, None, out)
        results.append(out)
    error = (results[0] - results[1]).square().mean() / results[1].square().mean()
    assert error < (1e-11 if dtype == "float32" else 1e-6)


def test_wrong_widths_are_refused(backend: CpuBackend) -> None:
    cache = AttentionCache(1, 48, 32, latent=True)
    pages, batch = make_pages(cache, 60, 16, "float16"), make_batch(8, 8, 16)
    with closing(Ops("cpu", num_threads=1)) as ops:
        x = torch.zeros(8, 2, 48)
        with pytest.raises(KernelError, match="2 query heads of 48 with 0 latent values"):
            ops.attention(x, pages, batch, scale=1.0)
        plain = make_pages(AttentionCache(1, 48, 32), 60, 16, "float16")
        with pytest.raises(KernelError, match="with 32 latent values do not fit"):
            ops.attention(x, plain, batch, scale=1.0, latent=32)
        with pytest.raises(KernelError, match="values of 1 to 48 dimensions, found 56"):
            ops.attention(x, pages, batch, scale=1.0, latent=56)
        angles = torch.zeros(8, 12)
        with pytest.raises(KernelError, match="latent pages and at most 16 rotated dimensions"):
            parts = (x, x[..., 32:], x[:, :1, :32], x[:, :1, 32:])
            ops.latent.rope_and_cache(*parts, angles, angles, batch, pages)
        with pytest.raises(KernelError, match="expected contiguous heads"):
            one = ops.linear(Dense(torch.zeros(8, 8)))
            ops.latent.group([one]).matmul(torch.zeros(4, 1, 16)[..., ::2], torch.zeros(4, 1, 8))
    kernel = plain_kernels(backend, "attention")[0]
    problem = Problem("attention", head_dim=64, value_dim=12, kv_dtype="int8")
    assert kernel.reject(problem) == "value_dim 12: expected a multiple of 8 up to 576"
    tiered = kernel.reject(replace(problem, value_dim=32, kv_dtype="float16>int8"))
    assert tiered is not None and "several tiers: expected 64" in tiered
    wide = make_pages(AttentionCache(1, 576, 512, latent=True), 60, 16, "int8")
    one_scale = replace(wide, k_scale=wide.k_scale[:, :1])  # type: ignore[index]
    with pytest.raises(KernelError, match="int8: expected a scale for at most 512 dimensions"):
        out = torch.zeros(8, 2 * 512)
        kernel.run(torch.zeros(8, 2, 576), one_scale, batch, 1.0, None, None, None, None, out)


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("form", ["dense", "int4", "q8"])
@pytest.mark.parametrize("bits", [8, 16])
def test_each_head_has_its_own_product(cases: Any, form: str, tokens: int, bits: int) -> None:
    """x and the result are parts of wider heads, as in latent attention."""
    heads, n, k = 5, 72, 64
    random = torch.Generator().manual_seed(2)
    layouts: list[Layout] = [
        Dense(torch.randn(n, k, generator=random).half())
        if form == "dense"
        else cases.affine(n, k, bits=4 if form == "int4" else 8, seed=head)
        for head in range(heads)
    ]
    x = torch.randn(tokens, heads, k + 16, generator=random)[..., :k]
    with closing(Ops("cpu", num_threads=2)) as ops:
        bound = [ops.linear(layout, bits) for layout in layouts]
        group = ops.latent.group(bound)
        assert group.packed is not None
        wide = torch.full((tokens, heads, n + 8), float("nan"))
        found = group.matmul(x, wide[..., :n])
        for head, own in enumerate(bound):
            assert torch.equal(found[:, head], own.matmul(x[:, head]))
        assert wide[..., n:].isnan().all()
        several = replace(group, packed=None)  # a kernel that multiplies one head at a time
        assert torch.equal(several.matmul(x, torch.zeros(tokens, heads, n)), found)
