"""Specs print and parse as users write them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from sdk.quant.spec import KVSpec, QuantSpec


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
    ],
)
def test_a_spec_reads_back_as_written(text: str) -> None:
    assert str(QuantSpec.parse(text)) == text


@given(
    bits=st.integers(2, 8),
    group=st.one_of(st.none(), st.integers(1, 4096)),
    symmetric=st.booleans(),
    activation_bits=st.sampled_from([8, 16]),
)
def test_every_integer_spec_survives_a_round_trip(
    bits: int, group: int | None, symmetric: bool, activation_bits: int
) -> None:
    spec = QuantSpec("int", bits, group=group, symmetric=symmetric, activation_bits=activation_bits)
    assert QuantSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text", ["", "w9a16", "w4", "w4a4", "q8_k", "w4a16g0", "W4A16", "w4a16gx", "nf4g0", "nf5"]
)
def test_an_unknown_spec_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="quant spec") as error:
        QuantSpec.parse(text)
    assert repr(text) in str(error.value)


def test_page_bytes_count_keys_and_values_of_all_layers() -> None:
    spec = KVSpec(num_layers=30, kv_heads=3, head_dim=64, page_size=16, dtype="float16")
    assert spec.page_bytes == 30 * 2 * 3 * 16 * 64 * 2
    assert replace(spec, dtype="int8").page_bytes == 30 * 2 * 3 * 16 * (64 + 2)
