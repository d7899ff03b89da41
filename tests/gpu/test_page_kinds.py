"""The Triton kernels and the descriptors of KV cache types agree on numbers and names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import attention, page_codes, pages, rope
from sdk.kernels.kv.kv_types import HALF_MAX, KV_TYPES
from sdk.quant.spec import KVSpec

#: The constants that the kernels' sources use.
KINDS = {
    "float32": pages.FLOAT, "float16": pages.FLOAT, "bfloat16": pages.FLOAT, "int8": pages.INT8,
    "fp8": pages.E4M3, "fp8_e5m2": pages.E5M2, "int4": pages.INT4,
}  # fmt: skip


def test_kernels_know_the_types_by_the_descriptors_numbers() -> None:
    known = {name: kind.gpu_kind for name, kind in KV_TYPES.items() if kind.gpu_kind is not None}
    assert {name: constant.value for name, constant in KINDS.items()} == known
    assert page_codes.HALF_MAX.value == HALF_MAX
    assert page_codes._INT8_PEAK.value == KV_TYPES["int8"].largest
    for name in ("fp8", "fp8_e5m2"):
        assert page_codes._FLOAT8_PEAK.value == KV_TYPES[name].largest


@pytest.mark.parametrize("kernel", [attention.Attention(exact=False), rope.RopeAndCache()])
def test_a_type_is_accepted_or_rejected_by_name(kernel: Any) -> None:
    numbers = {name: kind.gpu_kind for name, kind in KV_TYPES.items()}
    for name, number in {**numbers, "toy": None}.items():
        reason = kernel.reject(Problem("attention", head_dim=64, kv_dtype=name))
        if number is None:
            assert f"KV pages of {name}: expected float32, float16" in reason
        else:
            assert reason is None
    assert "KV pages of float16>int8" in kernel.reject(
        Problem("attention", head_dim=64, kv_dtype="float16>int8")
    )


@pytest.mark.parametrize("name", KINDS)
def test_sides_are_what_the_descriptors_say(name: str) -> None:
    kind = KV_TYPES[name]
    layer = KVCache(KVSpec(1, 2, 80, 16, name), 3, keys_transposed=False).layers[0]
    for side, values in zip(pages.page_sides(layer, 80), (0, 1), strict=True):
        assert side.kind == kind.gpu_kind and side.mixed == kind.hadamard
        assert side.groups == max(kind.scales_per_head(80, values), 1)
    other = next(x for x in KV_TYPES.values() if x.storage != kind.storage)
    with pytest.raises(KernelError, match=f"KV pages of {other.name}: expected"):
        pages.page_sides(replace(layer, v_type=other), 80)
    unknown = replace(kind, name="toy", gpu_kind=None)
    with pytest.raises(KernelError, match="KV pages of toy"):
        pages.page_sides(replace(layer, k_type=unknown), 80)
