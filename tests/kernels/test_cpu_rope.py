"""Native rotary embedding and the write into KV pages, at every SIMD level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.cpu import CpuBackend
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.page_codes import mixed
from sdk.kernels.reference.rope import RopeAndCache, RopeAngles, rotate
from sdk.models.rope import Rope, RopeSpec
from sdk.quant.spec import KVSpec

DTYPES = (
    *("float32", "float16", "bfloat16", "int16", "int8", "fp8", "fp8_e5m2", "int4", "k8v4"),
    "int4/fp8",
)
TOKENS, NUM_PAGES = 70, 6


def make_batch(page_size: int) -> AttentionBatch:
    """Slots in random order; attention's own index tensors are not read here."""
    slots = torch.randperm(NUM_PAGES * page_size, generator=torch.Generator().manual_seed(3))
    empty = torch.zeros(1, dtype=torch.int32)
    slots = slots[:TOKENS]
    return AttentionBatch(slots, empty, empty, empty[None], slots, page_size, 1, 1)


def make_pages(kv_heads: int, page_size: int, head_dim: int, dtype: str) -> KVPages:
    return KVCache(KVSpec(1, kv_heads, head_dim, page_size, dtype), NUM_PAGES).layers[0]


def rows(head_dim: int, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """One fused projection of 6 query and 2 key heads, and its q, k, v."""
    fused = torch.randn(TOKENS, 10 * head_dim, generator=torch.Generator().manual_seed(seed))
    split = fused.split([6 * head_dim, 2 * head_dim, 2 * head_dim], dim=1)
    return fused, [x.view(TOKENS, -1, head_dim) for x in split]


@pytest.mark.quick_cases(32)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "rotary", "page_size"),
    [(40, 40, 16), (64, 24, 13), (80, 80, 16), (96, 48, 16), (256, 256, 16)],
)
def test_rope_and_cache_equals_the_reference_bit_for_bit(
    backend: CpuBackend, dtype: str, head_dim: int, rotary: int, page_size: int
) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    batch = make_batch(page_size)
    angle = torch.rand(TOKENS, rotary // 2, generator=torch.Generator().manual_seed(1)) * 6
    results = []
    for run in (kernel.run, RopeAndCache().run):
        fused, (q, k, v) = rows(head_dim)
        k[3, 1, 5] = float("nan")
        v[:, 1, -3] *= 1e6  # beyond float16
        v[4, 0, 2] = float("inf")
        v[5] = 0.0
        pages = make_pages(2, page_size, head_dim, dtype)
        run(q, k, v, angle.cos(), angle.sin(), batch, pages)
        written = (pages.k, pages.v, pages.k_scale, pages.v_scale)
        results.append([fused, *(x.float() for x in written if x is not None)])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    if dtype == "float16":
        assert results[0][2].max() == 65504
    if dtype == "int8":
        assert results[0][3].isnan().any() and results[0][4].isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary"), [(40, 40), (64, 24), (256, 0)])
def test_norms_of_heads_and_a_scale_by_position_are_those_of_the_reference(
    backend: CpuBackend, dtype: str, after: bool, head_dim: int, rotary: int
) -> None:
    """Before or after the rotation, with one of values; positions are the slots."""
    (kernel,) = backend.implementations("rope_and_cache")
    batch = make_batch(16)
    random = torch.Generator().manual_seed(1)
    angle = torch.rand(TOKENS, rotary // 2, generator=random) * 6
    weights = torch.rand(3, head_dim, generator=random) + 0.5
    norms = HeadNorms(*(Norm(weight, 1e-5) for weight in weights), after)
    scale = QueryScale(0.3, 7)
    results = []
    for run in (kernel.run, RopeAndCache().run):
        _, (q, k, v) = rows(head_dim)
        v[5] = 0.0
        pages = make_pages(2, 16, head_dim, dtype)
        run(q, k, v, angle.cos(), angle.sin(), batch, pages, norms, scale)
        written = (pages.k, pages.v, pages.k_scale, pages.v_scale)
        results.append([q, *(x.float() for x in written if x is not None)])
    steps = {"float32": (1e-6, 1e-6), "float16": (2e-3, 1e-5), "int8": (2e-3, 1.0)}
    relative, least = steps[dtype]
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    for found, wanted in zip(results[0][1:], results[1][1:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=relative, atol=least)
    if dtype == "float32":
        _, (q, _, v) = rows(head_dim)
        v[5] = 0.0
        turned = rotate(q, angle.cos(), angle.sin()) if after else q
        normal = torch.nn.functional.rms_norm(turned, (head_dim,), weights[0], 1e-5)
        turned = normal if after else rotate(normal, angle.cos(), angle.sin())
        turned *= (1 + 0.3 * torch.log1p((batch.positions // 7).float()))[:, None, None]
        torch.testing.assert_close(results[0][0], turned, rtol=1e-5, atol=1e-5)
        at = batch.slots // 16, slice(None), batch.slots % 16
        values = torch.nn.functional.rms_norm(v, (head_dim,), weights[2], 1e-5)
        torch.testing.assert_close(results[0][2][at], values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int16", "int8", "int4"])
def test_a_centre_is_taken_from_every_key(backend: CpuBackend, dtype: str) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    batch = make_batch(16)
    angle = torch.rand(TOKENS, 32, generator=torch.Generator().manual_seed(1)) * 6
    centre = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    written = []
    for run in (kernel.run, RopeAndCache().run):
        _, (q, k, v) = rows(64)
        pages = replace(make_pages(2, 16, 64, dtype), k_centre=centre)
        run(q, k, v, angle.cos(), angle.sin(), batch, pages)
        written.append(pages)
    assert torch.equal(written[0].k, written[1].k) and torch.equal(written[0].v, written[1].v)
    if dtype == "float32":
        _, (_, k, _) = rows(64)
        at = batch.slots // 16, slice(None), batch.slots % 16
        assert torch.equal(written[0].k[at], rotate(k, angle.cos(), angle.sin()) - centre)


def test_int8_pages_are_within_half_a_step_of_their_values(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    batch, pages = make_batch(16), make_pages(2, 16, 64, "int8")
    _, (q, k, v) = rows(64)
    v *= torch.logspace(-9, 4, TOKENS).view(-1, 1, 1)
    still = torch.zeros(TOKENS, 0)
    whole = q.clone()
    kernel.run(q, k, v, still, still, batch, pages)
    assert (q[:, :2] * mixed(k)).sum(2).sub((whole[:, :2] * k).sum(2)).abs().max() < 1e-4
    assert pages.k_scale is not None and pages.v_scale is not None
    at = batch.slots // 16, slice(None), batch.slots % 16
    for x, codes, scales in (
        (mixed(k), pages.k, pages.k_scale),
        (mixed(v), pages.v, pages.v_scale),
    ):
        scale = scales[at].float().unsqueeze(2)
        error = (codes[at].float() * scale - x).abs()
        assert (error <= 0.5005 * scale + 2.0**-24 * 64).all()
        peak = x.abs().amax(dim=2, keepdim=True)
        large = peak > 0.01  # smaller scales are denormal
        assert (scale[large] <= peak[large] / 127 * 1.001).all()


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "int4"])
def test_small_codes_are_within_half_a_step_of_their_values(
    backend: CpuBackend, dtype: str
) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    batch, pages = make_batch(16), make_pages(2, 16, 96, dtype)
    _, (q, k, v) = rows(96)
    still = torch.zeros(TOKENS, 0)
    kernel.run(q, k, v, still, still, batch, pages)
    at = batch.slots // 16, slice(None), batch.slots % 16
    for x, codes, scales in ((k, pages.k, pages.k_scale), (v, pages.v, pages.v_scale)):
        assert scales is not None
        found = pages.k_type.decode(codes[at], scales[at].unflatten(1, (2, -1)))
        error = (found - x).abs()
        if dtype == "int4":
            error = (found - mixed(x)).abs()
            # 15 steps from end to end; the scale itself is off by up to a 16th
            groups = mixed(x).split([64, 32] if codes is pages.v else [32, 32, 32], dim=2)
            for part, off in zip(groups, error.split([y.shape[2] for y in groups], 2), strict=True):
                step = (part.amax(2) - part.amin(2)) / 15
                assert (off.amax(2) <= step * (0.5 + 0.5 + 1 / 16)).all()
        else:
            bits = 3 if dtype == "fp8" else 2
            assert (error <= x.abs() * 2.0 ** -(bits + 1) * 1.001 + x.abs().amax() * 2.0**-16).all()


def test_angles_are_those_of_the_models(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("rope_angles")
    positions = torch.tensor([0, 1, 2, 77, 4095, 131071])
    rope = Rope(RopeSpec(theta=1e5, rotary_dim=48, max_position=8192), 8192, torch.device("cpu"))
    found, wanted = ([torch.empty(6, 24), torch.empty(6, 24)] for _ in range(2))
    kernel.run(positions, rope.inv_freq, 1.25, *found)
    RopeAngles().run(positions, rope.inv_freq, 1.25, *wanted)
    plain = rope.cos_sin(positions, Ops("cpu", backends=["reference"]))
    for x, y, z in zip(found, wanted, plain, strict=True):
        assert torch.equal(y, z * 1.25)
        assert (x - y).abs().max() < 3e-7  # 2 units in the last place
    with pytest.raises(KernelError, match=r"rope angles: positions \[6\] and inv_freq \[23\]"):
        kernel.run(positions, rope.inv_freq[:23], 1.0, *found)


@pytest.mark.parametrize("backends", [["reference"], ["cpu"]])
def test_each_frequency_turns_by_the_positions_of_its_axis(backends: list[str]) -> None:
    """As rows of one axis each, taken apart: the same bits."""
    ops = Ops("cpu", backends=backends)
    positions = torch.randint(0, 5000, (3, 7), generator=torch.Generator().manual_seed(1))
    inv_freq = 1.0 / 1e4 ** (torch.arange(11) / 11)
    axes = torch.tensor([0, 1, 2, 0, 1, 2, 2, 2, 0, 0, 1], dtype=torch.int32)
    found = ops.rope_angles(positions, inv_freq, 1.5, axes)
    each = [ops.rope_angles(row.contiguous(), inv_freq, 1.5) for row in positions]
    for i, axis in enumerate(axes.tolist()):
        for x, y in zip(found, each[axis], strict=True):
            assert torch.equal(x[:, i], y[:, i])
    wide = torch.zeros(3, 20, dtype=torch.int64)
    wide[:, 4:11] = positions
    for x, y in zip(ops.rope_angles(wide[:, 4:11], inv_freq, 1.5, axes), found, strict=True):
        assert torch.equal(x, y)
    shifts = torch.zeros(3, 20, dtype=torch.int32)[:, 4:11]
    shifts += positions - positions[1]
    moved = ops.rope_angles(positions[1].contiguous(), inv_freq, 1.5, axes, shifts)
    for x, y in zip(moved, found, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(KernelError, match="rope_angles axes"):
        ops.rope_angles(positions, inv_freq, 1.0, axes[:10])
    with pytest.raises(KernelError, match="rope_angles positions"):
        ops.rope_angles(positions[0], inv_freq, 1.0, axes)
    if backends == ["cpu"]:
        for wrong in (axes + 1, axes - 1):
            with pytest.raises(KernelError, match="rope angles: axes"):
                ops.rope_angles(positions, inv_freq, 1.0, wrong)
            with pytest.raises(KernelError, match="rope angles: axes"):
                ops.rope_angles(positions[1].contiguous(), inv_freq, 1.0, wrong, shifts)
    ops.close()


def test_rope_refuses_arguments_that_disagree(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    batch, pages = make_batch(16), make_pages(2, 16, 16, "float32")
    _, (q, k, v) = rows(16)
    angle = torch.zeros(TOKENS, 8)
    with pytest.raises(KernelError, match=r"rope: q .* do not agree"):
        kernel.run(q, k, v[:, :1], angle, angle, batch, pages)
    with pytest.raises(KernelError, match=r"expected cos and sin \[70, at most 8\]"):
        kernel.run(q, k, v, torch.zeros(70, 9), torch.zeros(70, 9), batch, pages)
    with pytest.raises(KernelError, match=r"expected int64 slots \[70\]"):
        kernel.run(q, k, v, angle, angle, replace(batch, slots=batch.slots[:1]), pages)
    with pytest.raises(KernelError, match=r"KV pages of float32: expected"):
        kernel.run(q, k, v, angle, angle, batch, replace(pages, k=pages.k[:, :1], v=pages.v[:, :1]))
    with pytest.raises(KernelError, match=r"float32 centre \[2, 16\], found .* \[16\]"):
        kernel.run(q, k, v, angle, angle, batch, replace(pages, k_centre=torch.zeros(16)))
    one = Norm(torch.ones(16), 1e-5)
    for norms in (
        HeadNorms(one, Norm(torch.ones(2, 16), 1e-5)),
        HeadNorms(one, replace(one, eps=1.0)),
    ):
        with pytest.raises(KernelError, match=r"rope: expected RMSNorms with one weight for all"):
            kernel.run(q, k, v, angle, angle, batch, pages, norms)
    short = HeadNorms(one, Norm(torch.ones(15), 1e-5))
    with pytest.raises(KernelError, match=r"rope k norm: expected torch.float32 \[16\]"):
        kernel.run(q, k, v, angle, angle, batch, pages, short)
    with pytest.raises(KernelError, match=r"rope v: expected torch\.float32 on cpu"):
        kernel.run(q, k, v.double(), angle, angle, batch, pages)


@pytest.mark.parametrize("slot", [-1, NUM_PAGES * 16])
def test_slots_outside_of_the_pages_are_refused(backend: CpuBackend, slot: int) -> None:
    (kernel,) = backend.implementations("rope_and_cache")
    batch, pages = make_batch(16), make_pages(2, 16, 16, "float16")
    _, parts = rows(16)
    still: Any = torch.zeros(TOKENS, 0)
    slots = batch.slots.clone()
    slots[7] = slot
    with pytest.raises(KernelError, match="a token or page id, row, slot or length lies outside"):
        kernel.run(*parts, still, still, replace(batch, slots=slots), pages)
    assert not pages.k.any() and not pages.v.any()
