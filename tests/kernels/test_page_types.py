"""What every descriptor of a KV cache type promises: errors, bytes, backends, and the numbers that
C++ knows the types by.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.kv_transfer import row_widths
from sdk.kernels.backend import Problem
from sdk.kernels.cpu import CpuBackend
from sdk.kernels.kv.kv_types import (
    KV_ALIASES,
    KV_TYPES,
    KVType,
    WordType,
    ZeroPointType,
    scale_group,
)
from sdk.kernels.reference import ReferenceBackend
from sdk.kernels.reference.page_codes import encode
from sdk.quant.spec import KVSpec, KVTypes
from tests.kernels.plain_kernels import plain_kernels

ABI = Path(__file__).parents[2] / "kernels/cpu/native/abi_weights.hpp"
#: The names of ``ElementType`` in C++.
NATIVE = {
    "float32": "kF32", "float16": "kF16", "bfloat16": "kBF16", "int16": "kI16", "int8": "kI8",
    "fp8": "kE4M3", "fp8_e5m2": "kE5M2", "int4": "kI4",
}  # fmt: skip
every_type = pytest.mark.parametrize("kind", KV_TYPES.values(), ids=KV_TYPES.keys())


def largest_errors(kind: KVType, x: Tensor, group: int) -> Tensor:
    """Half a step for each value of ``x``; with a zero point one step, and a 16th for the scale."""
    parts = x.split(group, dim=-1)
    peak = torch.cat([p.abs().amax(-1, keepdim=True).expand_as(p) for p in parts], -1)
    span = [p.amax(-1, keepdim=True).clamp(min=0) - p.amin(-1, keepdim=True).clamp(max=0)
            for p in parts]  # fmt: skip
    if isinstance(kind, ZeroPointType):
        wide = torch.cat([s.expand_as(p) for s, p in zip(span, parts, strict=True)], -1)
        return wide / kind.largest * (1 + 1 / 16)
    scale = peak / kind.largest if kind.scale else torch.ones_like(x)
    if isinstance(kind, WordType):
        scale = scale * (1 + 2**-7)  # rounded up to a bfloat16
    if not kind.storage_dtype.is_floating_point:
        return scale * 0.5005
    info = torch.finfo(kind.storage_dtype)
    return x.abs() * info.eps * 0.5005 + scale * info.smallest_normal * info.eps


@every_type
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_values_survive_within_half_a_step(kind: KVType, head_dim: int) -> None:
    random = torch.Generator().manual_seed(head_dim)
    x = torch.randn(5, 3, head_dim, generator=random) * torch.tensor([1, 0.1, 30]).view(3, 1)
    x[4, 1] = 0
    for side in (0, 1):
        groups = kind.scales_per_head(head_dim, side)
        codes, scales = kind.encode(x, groups)
        assert codes.dtype == kind.storage_dtype and codes.shape[-1] * kind.packing == head_dim
        assert (scales is None) == (not kind.scale)
        if scales is not None:
            assert scales.dtype == kind.scale_dtype and scales.shape == (5, 3, groups)
        error = (kind.decode(codes, scales) - x).abs()
        bound = largest_errors(kind, x, scale_group(head_dim, groups) if groups else head_dim)
        assert (error <= bound).all(), error.sub(bound).amax()
        assert (kind.decode(codes, scales)[4, 1] == 0).all()


@every_type
@pytest.mark.parametrize("mix", [False, True])
def test_a_nan_stays_visible_and_inf_saturates(kind: KVType, mix: bool) -> None:
    x = torch.linspace(-2, 2, 128).repeat(2, 1)
    x[1, 100] = float("nan")
    codes, scales = encode(x, kind, kind.scales_per_head(128, 0), mix=mix)
    found = kind.decode(codes, scales)
    assert found[0].isfinite().all() and found[1].isnan().any()
    x[1, 100] = float("inf")
    if kind.name == "float16" or kind.scale or mix:
        codes, scales = encode(x, kind, kind.scales_per_head(128, 0), mix=mix)
        assert kind.decode(codes, scales).isfinite().all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("v", KV_TYPES)
@pytest.mark.parametrize("k", KV_TYPES)
def test_page_bytes_are_those_of_the_tensors(k: str, v: str, transposed: bool) -> None:
    spec = KVSpec(2, 2, 80, 16, f"{k}/{v}")
    cache = KVCache(spec, 3, keys_transposed=transposed)
    total = 0
    for layer, pages in enumerate(cache.layers):
        assert (pages.k_type, pages.v_type) == (KV_TYPES[k], KV_TYPES[v])
        assert pages.dtype == (k if k == v else f"{k}/{v}") and pages.head_dim == 80
        sides = (pages.k, pages.k_scale, pages.k_type), (pages.v, pages.v_scale, pages.v_type)
        for (codes, scales, kind), part in zip(sides, spec.parts(layer), strict=True):
            assert codes.dtype == kind.storage_dtype and codes[0].nbytes == part.code_bytes
            assert (0 if scales is None else scales[0].nbytes) == part.scale_bytes
            assert scales is None or scales.dtype == kind.scale_dtype
            total += codes.nbytes + part.scale_bytes * 3
        assert sum(row_widths(spec, layer)) * 2 * 16 == spec.layer_bytes(layer)
    assert total == 3 * spec.page_bytes


@pytest.mark.parametrize("op", ["attention", "rope_and_cache", "recode_page"])
def test_a_backend_accepts_a_type_or_rejects_it_by_name(backend: CpuBackend, op: str) -> None:
    (native,) = plain_kernels(backend, op)
    (reference,) = ReferenceBackend().implementations(op)
    numbers = {name: kind.cpu_element for name, kind in KV_TYPES.items()}
    for name, number in {**numbers, "toy": None}.items():
        problem = Problem(op, head_dim=64, kv_dtype=name)
        reason = native.reject(problem)
        if number is None:
            assert f"KV pages of {name}: expected float32, float16" in reason
            assert reason == native.reject(replace(problem, kv_dtype=f"int8/{name}"))
        else:
            assert reason is None
        assert reference.reject(problem) is None


def test_native_kernels_know_the_types_by_the_same_numbers() -> None:
    text = ABI.read_text(encoding="utf-8")
    found = dict(
        re.findall(r"^    (k\w+) = (\d+),?$", text.partition("enum ElementType {")[2], re.M)
    )
    known = {
        kind.name: kind.cpu_element for kind in KV_TYPES.values() if kind.cpu_element is not None
    }
    assert {name: int(found[native]) for name, native in NATIVE.items()} == known


def test_names_are_unique_and_all_are_understood() -> None:
    names = [*KV_TYPES, *KV_ALIASES]
    assert len(set(names)) == len(names) and set(KV_ALIASES.values()) <= set(KV_TYPES)
    shorts = [kind.short for kind in KV_TYPES.values() if kind.short]
    assert len(set(shorts)) == len(shorts)
    for name in names:
        assert str(KVTypes.parse(name)) == KV_ALIASES.get(name, name)
    for kind in KV_TYPES.values():
        if kind.short:
            assert KVTypes.parse(f"k{kind.short}v{kind.short}") == KVTypes(kind.name, kind.name)
    with pytest.raises(ValueError, match=f"expected {', '.join(KV_TYPES)}, k8v4-like"):
        KVTypes.parse("toy")


@every_type
def test_bytes_that_are_told_without_torch_are_torchs(kind: KVType) -> None:
    assert kind.code_bytes(64) == 64 // kind.packing * kind.storage_dtype.itemsize
    assert kind.bits * kind.packing <= 8 * kind.storage_dtype.itemsize
    assert kind.scale_bytes == (kind.scale_dtype.itemsize if kind.scale else 0)


@every_type
def test_kernels_find_the_groups_of_a_head_by_their_number(kind: KVType) -> None:
    for head_dim in range(8, 257, 8):
        for groups in {kind.scales_per_head(head_dim, side) for side in (0, 1)}:
            assert (groups > 0) == bool(kind.scale)
            if groups:
                group = scale_group(head_dim, groups)
                assert -(-head_dim // group) == groups
                assert groups == 1 or group & (group - 1) == 0  # what Triton splits a head into


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_several_values_share_an_element(bits: int) -> None:
    kind = replace(KV_TYPES["int4"], name="toy", bits=bits, largest=2.0**bits - 1)
    x = torch.arange(64) % (1 << bits) * 0.5
    codes, scales = kind.encode(x[None], 1)
    assert codes.shape == (1, 64 * bits // 8) and scales is not None
    assert torch.equal(kind.decode(codes, scales)[0], x)
