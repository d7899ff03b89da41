"""Rotary embedding and the write into pages under the Triton interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import rope as gpu_rope
from sdk.kernels.gpu.elementwise import Places
from sdk.kernels.gpu.page_codes import float8_bits
from sdk.kernels.gpu.rope import RopeAndCache, RopeAngles
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale
from sdk.kernels.operators.norm import Norm
from sdk.kernels.reference.elementwise import Places as ReferencePlaces
from sdk.kernels.reference.norm import Normalize
from sdk.kernels.reference.rope import (
    RopeAndCache as Reference,
    RopeAngles as ReferenceAngles,
    mixed,
    rotate,
)
from sdk.quant.spec import KVSpec

DTYPES = ("float32", "float16", "bfloat16", "int8")

SLOTS = [37, 3, 60, 16]


def make_batch(slots: list[int], page_size: int = 16) -> AttentionBatch:
    count = len(slots)
    return AttentionBatch(
        positions=torch.arange(count),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_len=torch.tensor([count], dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        slots=torch.tensor(slots),
        page_size=page_size,
        max_query_len=count,
        max_context_len=count,
    )


def make_pages(kv_heads: int, head_dim: int, dtype: str, pages: int = 4) -> KVPages:
    spec = KVSpec(1, kv_heads, head_dim, 16, dtype)
    return KVCache(spec, pages, keys_transposed=False).layers[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def written(
    run: Any, fused: Tensor, heads: int, kv_heads: int, pages: KVPages, rotary: int
) -> tuple[Tensor, KVPages]:
    """q as ``run`` leaves it, and the pages."""
    tokens = fused.shape[0]
    q, k, v = torch.split(fused.clone(), [heads, kv_heads, kv_heads], dim=1)
    random = torch.Generator().manual_seed(9)
    angle = torch.rand(tokens, rotary // 2, generator=random) * 7
    run(q, k, v, angle.cos(), angle.sin(), make_batch(SLOTS[:tokens]), pages)
    return q, pages


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary", "heads", "kv_heads"),
    [(64, 64, 4, 2), (80, 32, 3, 1), (96, 96, 9, 9), (256, 128, 2, 1), (64, 0, 3, 1)],
)
def test_queries_turn_and_pages_hold_what_the_reference_writes(
    dtype: str, head_dim: int, rotary: int, heads: int, kv_heads: int
) -> None:
    random = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(4, heads + 2 * kv_heads, head_dim, generator=random) * 3
    fused[1, heads:] *= 1e-4
    q, pages = written(
        RopeAndCache().run, fused, heads, kv_heads, make_pages(kv_heads, head_dim, dtype), rotary
    )
    q_wanted, wanted = written(
        Reference().run, fused, heads, kv_heads, make_pages(kv_heads, head_dim, dtype), rotary
    )
    torch.testing.assert_close(q, q_wanted, rtol=1e-6, atol=1e-6)
    assert same_bits(pages.v, wanted.v)
    assert same_bits(pages.k, wanted.k)
    if pages.k_scale is not None and pages.v_scale is not None:
        assert wanted.k_scale is not None and wanted.v_scale is not None
        assert same_bits(pages.k_scale, wanted.k_scale)
        assert same_bits(pages.v_scale, wanted.v_scale)


def test_a_centre_is_taken_from_every_key() -> None:
    random = torch.Generator().manual_seed(2)
    fused, centre = torch.randn(3, 6, 80, generator=random), torch.randn(2, 80, generator=random)
    found, wanted = (
        written(run, fused, 2, 2, replace(make_pages(2, 80, "int8"), k_centre=centre), 80)[1]
        for run in (RopeAndCache().run, Reference().run)
    )
    assert same_bits(found.k, wanted.k) and same_bits(found.v, wanted.v)
    plain = written(Reference().run, fused, 2, 2, make_pages(2, 80, "int8"), 80)[1]
    assert not same_bits(plain.k, wanted.k)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 32)])
def test_heads_are_normalized_before_they_turn(dtype: str, head_dim: int, rotary: int) -> None:
    random = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(4, 3 + 2, head_dim, generator=random) * 5
    fused[2, 3] = 0.0
    weights = torch.rand(2, head_dim, generator=random) + 0.5
    norms = HeadNorms(Norm(weights[0], 1e-6), Norm(weights[1], 1e-6))

    def run(q: Tensor, k: Tensor, *others: Any) -> None:
        RopeAndCache().run(q, k, *others, norms)

    q, pages = written(run, fused, 3, 1, make_pages(1, head_dim, dtype), rotary)
    normal = fused.clone()
    for heads, weight in ((slice(0, 3), weights[0]), (slice(3, 4), weights[1])):
        Normalize().run(fused[:, heads], Norm(weight, 1e-6), normal[:, heads])
    q_wanted, wanted = written(
        Reference().run, normal, 3, 1, make_pages(1, head_dim, dtype), rotary
    )
    torch.testing.assert_close(q, q_wanted, rtol=2e-6, atol=2e-6)
    assert same_bits(pages.v, wanted.v)
    step = {"float32": 2e-6, "bfloat16": 2**-8, "int8": 1.0}[dtype]  # of the last bit, or one code
    torch.testing.assert_close(pages.k.float(), wanted.k.float(), rtol=step, atol=step)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("after", [False, True])
def test_values_are_normalized_and_queries_scaled_by_position(dtype: str, after: bool) -> None:
    fused = torch.randn(4, 5, 80, generator=torch.Generator().manual_seed(6)) * 5
    weights = torch.rand(3, 80, generator=torch.Generator().manual_seed(7)) + 0.5
    more = HeadNorms(*(Norm(weight, 1e-6) for weight in weights), after), QueryScale(0.3, 2)
    found, wanted = (
        written(lambda *a, run=run: run(*a, *more), fused, 3, 1, make_pages(1, 80, dtype), 32)
        for run in (RopeAndCache().run, Reference().run)
    )
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-6, atol=2e-6)
    step = {"float32": 2e-6, "int8": 1.0}[dtype]
    for name in ("k", "v"):
        codes = (getattr(pages, name).float() for _, pages in (found, wanted))
        torch.testing.assert_close(*codes, rtol=step, atol=step)


def test_norms_of_another_form_are_refused() -> None:
    norms = HeadNorms(Norm(torch.ones(64), 1e-6, centred=True), Norm(torch.ones(64), 1e-6))
    fused = torch.ones(4, 5, 64)

    def run(q: Tensor, k: Tensor, *others: Any) -> None:
        RopeAndCache().run(q, k, *others, norms)

    with pytest.raises(KernelError, match="rope: expected RMSNorms with one weight for all heads"):
        written(run, fused, 3, 1, make_pages(1, 64, "float32"), 64)


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_what_is_too_large_saturates_and_what_is_no_number_stays_visible(dtype: str) -> None:
    fused = torch.randn(3, 3, 64, generator=torch.Generator().manual_seed(1))
    fused[0] *= 1e30
    fused[1, 1:, 5] = float("nan")
    fused[2, 1:, 40] = float("inf")
    _, pages = written(RopeAndCache().run, fused, 1, 1, make_pages(1, 64, dtype), 0)
    _, wanted = written(Reference().run, fused, 1, 1, make_pages(1, 64, dtype), 0)
    for found, right in ((pages.k, wanted.k), (pages.v, wanted.v)):
        torch.testing.assert_close(found.float(), right.float(), rtol=0, atol=0, equal_nan=True)
    if pages.v_scale is not None:
        assert pages.v_scale[0, 0, 3].isnan()
        assert pages.v_scale[2, 0, 5].isfinite()
    else:
        assert pages.v[0, 0, 3, 5].isnan() and pages.v[0, 0, 3, 6].isfinite()


@triton.jit
def cast_kernel(x, out, count, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    values = tl.load(x + place, mask=place < count, other=0.0)
    tl.store(out + place, float8_bits(values, MANTISSA, BIAS).to(tl.uint8), mask=place < count)


def test_every_8_bit_float_is_rounded_as_torch_rounds() -> None:
    # every half step between neighbouring codes, and its float32 neighbours
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(127, dtype=torch.uint8).view(dtype).float()
        codes = codes[codes.isfinite() & (codes <= 448)]
        middle = (codes[1:] + codes[:-1]) / 2
        bits = middle.view(torch.int32)
        near = torch.cat([x.view(torch.float32) for x in (bits - 1, bits, bits + 1)])
        assert same_bits(_cast(near, dtype).view(torch.uint8), near.to(dtype).view(torch.uint8))
        assert same_bits(_cast(-near, dtype).view(torch.uint8), (-near).to(dtype).view(torch.uint8))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Through the kernel's own conversion, without a scale."""
    out = torch.empty(len(x), dtype=torch.uint8)
    mantissa, bias = (3, 7) if dtype == torch.float8_e4m3fn else (2, 15)
    block = triton.next_power_of_2(len(x))
    cast_kernel[(1,)](x, out, len(x), MANTISSA=mantissa, BIAS=bias, BLOCK=block)
    return out


def rounded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One group ``x [..., d]``: codes (of int4 one in a byte) and scale, by the definition."""
    if dtype == torch.uint8:
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        exact = ((high - low) / 15).half().view(torch.int16).to(torch.int32)
        bits = (exact + 63 + (exact >> 7 & 1)) >> 7  # ties to even, 3 bits of mantissa stay
        scale = (bits << 7).to(torch.int16).view(torch.float16).float()
        inverse = torch.where(scale > 0, 1 / scale, 0)
        zero = torch.round((7.5 - (high + low) * 0.5 * inverse) * 16).clamp(0, 255)
        codes = torch.round(x * inverse[..., None] + zero[..., None] * 0.0625).clamp(0, 15)
        return codes.to(torch.uint8), (zero.to(torch.int32) << 8 | bits).to(torch.int16)
    peak = 127 if dtype == torch.int8 else 448
    scale = (x.abs().amax(-1) / peak).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0)
    codes = (x * inverse[..., None]).clamp(-peak, peak)
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scale


@pytest.mark.parametrize(
    ("k_name", "v_name", "head_dim", "groups"),
    [
        ("int4", "int8", 64, 2),
        ("int8", "int4", 80, 3),
        ("int4", "fp8_e5m2", 96, 1),
        ("fp8", "int4", 128, 4),
        ("float16", "fp8", 64, 1),
    ],
)
def test_keys_and_values_have_types_and_groups_of_their_own(
    k_name: str, v_name: str, head_dim: int, groups: int
) -> None:
    random = torch.Generator().manual_seed(head_dim)
    fused = torch.randn(4, 2 + 2 * 2, head_dim, generator=random) * 3
    fused[1] *= 1e-3
    k_type, v_type = KV_TYPES[k_name], KV_TYPES[v_name]
    sides = []
    for dtype in (k_type.storage_dtype, v_type.storage_dtype):
        width = head_dim // 2 if dtype == torch.uint8 else head_dim
        codes = torch.zeros(4, 2, 16, width).to(dtype)
        kind = torch.int16 if dtype == torch.uint8 else torch.float16
        scale = None if dtype == torch.float16 else torch.zeros(4, 2 * groups, 16, dtype=kind)
        sides.append((codes, scale))
    (k, k_scale), (v, v_scale) = sides
    empty = KVPages(k, v, k_type, v_type, k_scale, v_scale)
    q, pages = written(RopeAndCache().run, fused, 2, 2, empty, head_dim)
    q_wanted, turned = turned_heads(fused, head_dim)
    integers = (torch.int8, torch.uint8)
    close_q = mixed(q_wanted) if k_type.storage_dtype in integers else q_wanted
    torch.testing.assert_close(q, close_q, rtol=1e-6, atol=1e-6)
    size = -(-head_dim // (32 * groups)) * 32
    for x, codes, scale in (
        (turned, pages.k, pages.k_scale),
        (fused[:, 4:], pages.v, pages.v_scale),
    ):
        x = mixed(x) if codes.dtype in integers else x
        parts = [rounded(part, codes.dtype) for part in x.split(size, dim=-1)]
        wanted = torch.cat([part for part, _ in parts], dim=-1)
        if codes.dtype == torch.float16:
            wanted = x.half()
        if codes.dtype == torch.uint8:
            low, high = wanted.chunk(2, dim=-1)
            wanted = low | high << 4
        for token, slot in enumerate(SLOTS[:4]):
            assert same_bits(codes[slot // 16, :, slot % 16], wanted[token])
            if scale is not None:
                steps = torch.stack([step[token] for _, step in parts], dim=-1).flatten()
                assert same_bits(scale[slot // 16, :, slot % 16], steps)


def turned_heads(fused: Tensor, rotary: int) -> tuple[Tensor, Tensor]:
    """The first two heads and the next two as the angles of :func:`written` turn them."""
    random = torch.Generator().manual_seed(9)
    angle = torch.rand(fused.shape[0], rotary // 2, generator=random) * 7
    return rotate(fused[:, :2], angle.cos(), angle.sin()), rotate(
        fused[:, 2:4], angle.cos(), angle.sin()
    )


def test_angles_are_exact_far_from_the_origin() -> None:
    positions = torch.tensor([0, 1, 4095, 131071])
    inv_freq = 1.0 / 10000 ** (torch.arange(20) / 20)
    found = [torch.empty(4, 20) for _ in range(2)]
    wanted = [torch.empty(4, 20) for _ in range(2)]
    RopeAngles().run(positions, inv_freq, 1.25, *found)
    ReferenceAngles().run(positions, inv_freq, 1.25, *wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7)


def test_angles_of_three_axes() -> None:
    positions = torch.tensor([[0, 7, 4095, 9], [3, 131071, 1, 2], [5, 6, 0, 77]])
    axes = torch.tensor([0, 1, 2, 2, 0] * 4, dtype=torch.int32)
    inv_freq = 1.0 / 10000 ** (torch.arange(20) / 20)
    found = [torch.empty(4, 20) for _ in range(2)]
    wanted = [torch.empty(4, 20) for _ in range(2)]
    RopeAngles().run(positions, inv_freq, 1.25, *found, axes)
    ReferenceAngles().run(positions, inv_freq, 1.25, *wanted, axes)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7)
    shifts = torch.tensor([[0, 0, -90, 9], [3, 0, 1, 2], [5, -6, 0, 77]], dtype=torch.int32)
    wide = torch.zeros(3, 9, dtype=torch.int32)
    wide[:, :4] = shifts
    RopeAngles().run(positions[0], inv_freq, 1.25, *found, axes, wide[:, :4])
    ReferenceAngles().run(positions[0] + shifts, inv_freq, 1.25, *wanted, axes)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-7)


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [5, 1, 300, 2], [3] * 33])
def test_every_token_finds_its_place(counts: list[int]) -> None:
    random = torch.Generator().manual_seed(len(counts))
    total = sum(counts)
    lengths = [count + 11 * i for i, count in enumerate(counts)]
    table = torch.randperm(60 * len(counts), generator=random).view(len(counts), 60)
    batches = [
        AttentionBatch(
            positions=torch.full((total,), -1),
            query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            context_len=torch.tensor(lengths, dtype=torch.int32),
            page_table=table.to(torch.int32)[:, :50],  # rows further apart than wide
            slots=torch.full((total,), -1),
            page_size=16,
            max_query_len=max(counts),
            max_context_len=max(lengths),
        )
        for _ in range(2)
    ]
    Places().run(batches[0])
    ReferencePlaces().run(batches[1])
    assert torch.equal(batches[0].positions, batches[1].positions)
    assert torch.equal(batches[0].slots, batches[1].slots)


def test_shapes_that_disagree_are_refused() -> None:
    pages = make_pages(1, 64, "float32")
    batch = make_batch([0, 1])
    q, k = torch.zeros(2, 2, 64), torch.zeros(2, 1, 64)
    angles = torch.zeros(2, 32)
    with pytest.raises(KernelError, match="do not agree"):
        RopeAndCache().run(q, k, torch.zeros(2, 2, 64), angles, angles, batch, pages)
    with pytest.raises(KernelError, match="do not agree"):
        RopeAndCache().run(q, k, k, torch.zeros(2, 33), torch.zeros(2, 33), batch, pages)
    with pytest.raises(KernelError, match="contiguous heads"):
        apart = torch.zeros(2, 1, 128)[..., ::2]
        RopeAndCache().run(q, apart, k, angles, angles, batch, pages)


def test_codes_of_pages_are_computed_without_fusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """``x * inverse + zero`` of one rounding gives another code of 4 bits for 1 value in 10^7."""
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_rope, "run_kernel", lambda *_, **named: options.append(named))
    written(RopeAndCache().run, torch.zeros(1, 3, 32), 1, 1, make_pages(1, 32, "int4"), 32)
    assert [one["enable_fp_fusion"] for one in options] == [False]
