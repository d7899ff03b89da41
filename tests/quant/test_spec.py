"""Specs print and parse as users write them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from sdk.kernels.kv.kv_types import scale_group
from sdk.quant.spec import KVSpec, KVTypes, QuantSpec


@pytest.mark.parametrize(
    "text",
    [
        "f32",
        "f16",
        "bf16",
        "fp8",
        "q4_1",
        "q2_k",
        "q3_k",
        "q4_k",
        "q5_k",
        "q6_k",
        "nf4",
        "nf4g128",
        "fp4g4096",
        "mxfp4",
        "nvfp4",
        "iq4_nl",
        "iq4_xs",
        "iq3_s",
        "iq1_m",
        "q1_0",
        "tq1_0",
        "w4a16g128",
        "w8a8",
        "w4a16g32s",
        "w8a8s",
        "w4afp8g128",
        "fp8afp8",
        "nvfp4afp4",
        "nf4g128a8",
    ],
)
def test_a_spec_reads_back_as_written(text: str) -> None:
    assert str(QuantSpec.parse(text)) == text


@given(
    bits=st.integers(2, 8),
    group=st.one_of(st.none(), st.integers(1, 4096)),
    symmetric=st.booleans(),
    inputs=st.sampled_from([(4, False), (8, False), (16, False), (4, True), (8, True)]),
)
def test_every_integer_spec_survives_a_round_trip(
    bits: int, group: int | None, symmetric: bool, inputs: tuple[int, bool]
) -> None:
    spec = QuantSpec("int", bits, "", group, symmetric, *inputs)
    assert QuantSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "w9a16",
        "w4",
        "w4a1",
        "w4afp6",
        "w4afp16",
        "fp8a",
        "f32a9",
        "q8_k",
        "w4a16g0",
        "W4A16",
        "w4a16gx",
        "nf4g0",
        "nf5",
    ],
)
def test_an_unknown_spec_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="quant spec") as error:
        QuantSpec.parse(text)
    assert repr(text) in str(error.value)


def test_page_bytes_count_keys_and_values_of_all_layers() -> None:
    spec = KVSpec(num_layers=30, kv_heads=3, head_dim=64, page_size=16, dtype="float16")
    assert spec.page_bytes == 30 * 2 * 3 * 16 * 64 * 2
    assert replace(spec, dtype="int8").page_bytes == 30 * 2 * 3 * 16 * (64 + 2)


@pytest.mark.parametrize(
    "text",
    [
        *("float32", "float16", "bfloat16", "int16", "int8", "fp8", "fp8_e5m2", "int4", "k8v4"),
        *("k16v8", "int16/int8", "int8/fp8", "fp8/int4", "int4:skip=0", "k8v4:skip=0+17+29"),
    ],
)
def test_types_of_keys_and_values_read_back_as_written(text: str) -> None:
    assert str(KVTypes.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("fp8_e4m3", "fp8"),
        ("float8_e4m3fn", "fp8"),
        ("float8_e5m2", "fp8_e5m2"),
        ("bf16", "bfloat16"),
        ("k8v8", "int8"),
        ("int8/int4", "k8v4"),
        ("int4:skip=2+0+2", "int4:skip=0+2"),
    ],
)
def test_other_names_of_the_same_types_are_understood(text: str, known: str) -> None:
    assert str(KVTypes.parse(text)) == known


@pytest.mark.parametrize(
    "text",
    ["", "auto", "int3", "k8", "k8v5", "int8/", "int8/int4/int8", "int4:skip=", "int4:skip=-1"],
)
def test_unknown_types_of_keys_and_values_are_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="expected float32, float16") as error:
        KVTypes.parse(text)
    assert repr(text) in str(error.value)


def test_page_bytes_are_those_of_codes_and_scales() -> None:
    def ratio(dtype: str, head_dim: int) -> float:
        half = KVSpec(10, 2, head_dim, 16, "float16")
        return half.page_bytes / replace(half, dtype=dtype).page_bytes

    for head_dim in (64, 80, 96, 128, 256):
        assert ratio("int16", head_dim) >= 0.97
        assert ratio("int8", head_dim) >= 1.9 and ratio("fp8", head_dim) >= 1.9
        assert ratio("k8v4", head_dim) >= 2.5
        assert ratio("int4", head_dim) >= 3.6
    assert ratio("int4:skip=0+9", 64) == 10 / (2 + 8 / (128 / 35))


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
@pytest.mark.parametrize("dtype", ["int16", "int8", "fp8", "int4", "k8v4"])
def test_kernels_find_the_groups_of_a_head_by_their_number(dtype: str, head_dim: int) -> None:
    for part in KVSpec(1, 1, head_dim, 16, dtype).parts(0):
        group = scale_group(head_dim, part.groups)
        assert -(-head_dim // group) == part.groups
        assert part.groups == 1 or group & (group - 1) == 0  # what Triton splits a head into


def test_every_part_of_a_page_is_aligned_for_its_type() -> None:
    spec = KVSpec(num_layers=3, kv_heads=1, head_dim=8, page_size=1, dtype="k8v4:skip=1")
    assert [spec.layer_bytes(layer) for layer in range(3)] == [8 + 4 + 4 + 4, 32, 8 + 4 + 4 + 4]
