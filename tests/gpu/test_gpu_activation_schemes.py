"""Activations rounded as files ask for, on the GPU's kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile, bytes_of_card, multiplies_bytes
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.layouts import ActivationScheme, Affine, Float8
from sdk.kernels.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize

#: The interpreter computes what a mask or ``where`` leaves out, too, and numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
FEW = Tuning(programs=4)
BOTH = ("int", "e4m3")


def integers(cases: Any, scheme: ActivationScheme, columns: int = 256) -> Affine:
    """Weights with one scale for a row."""
    layout = cases.affine(37, columns, 8, columns, "zero", torch.float32, signed=True)
    return replace(layout, inputs=scheme)


def floats(cases: Any, scheme: ActivationScheme, height: int = 1) -> Float8:
    """Weights with one scale for so many rows."""
    return replace(cases.float8(20, 192, (height, 192)), inputs=scheme)


def hard_rows(cases: Any, rows: int, columns: int) -> Tensor:
    """Ordinary rows, a large one, one of zeros, one too small for a scale."""
    x: Tensor = cases.activations(rows, columns)
    x[1] *= 300
    x[2], x[3] = 0.0, x[3] * 1e-33
    return x


def product(linear: TritonLinearAsFile, layout: Affine | Float8, x: Tensor) -> Tensor:
    packed = linear.pack(layout)
    assert layout.inputs is not None
    assert multiplies_bytes(packed, layout.inputs, BOTH)
    out = torch.full((x.shape[0], layout.shape[0]), 7.0)
    linear.matmul(packed, x, out)
    return out


def as_defined(layout: Affine | Float8, x: Tensor) -> Tensor:
    assert layout.inputs is not None
    return fake_quantize(x, layout.inputs).double() @ decode(layout).double().t()


@pytest.mark.parametrize("kind", ["int", "e4m3"])
@pytest.mark.parametrize(
    "numbers", [{}, {"static": 0.03}, {"limit": 2.5}], ids=["dynamic", "static", "limited"]
)
@pytest.mark.parametrize("tokens", [4, 17])
def test_bytes_are_multiplied_as_the_definition_rounds_them(
    cases: Any, kind: Any, numbers: dict[str, float], tokens: int
) -> None:
    scheme = ActivationScheme(kind, **numbers)
    layout = integers(cases, scheme) if kind == "int" else floats(cases, scheme)
    x = hard_rows(cases, tokens, layout.shape[1])
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    expected = as_defined(layout, x)
    errors = (found - expected).norm(dim=1)
    assert (errors <= 1e-6 * expected.norm(dim=1)).all()


def test_one_scale_for_all_rows_follows_the_sum_too(cases: Any) -> None:
    layout = floats(cases, ActivationScheme("e4m3"), height=20)
    x = cases.activations(3, 192)
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    assert (found - as_defined(layout, x)).norm() < 1e-6 * found.norm()


def test_shares_of_the_columns_of_bytes_add_up(cases: Any) -> None:
    layout = integers(cases, ActivationScheme("int"), 512)
    tiles = [(99, Tiles(16, 16, 3, 4, 3))]
    tuning = replace(FEW, table={("int8g512", 37, 512): tiles})
    x = cases.activations(5, 512)
    found = product(TritonLinearAsFile(tuning, BOTH), layout, x)
    assert (found - as_defined(layout, x)).norm() < 1e-6 * found.norm()


def test_a_row_that_is_not_finite_is_not_a_number(cases: Any) -> None:
    layout = integers(cases, ActivationScheme("int"))
    x = cases.activations(3, 256)
    x[0, 7], x[2, 3] = math.inf, math.nan
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()
    assert found[2].isnan().all()


@pytest.mark.parametrize(
    ("capability", "amd", "codes"),
    [
        ((7, 5), False, ()),
        ((8, 0), False, ("int",)),
        ((8, 9), False, BOTH),
        ((12, 0), False, BOTH),
        ((9, 4), True, ("int",)),
    ],
)
def test_a_card_multiplies_the_bytes_it_has_instructions_for(
    capability: tuple[int, int], amd: bool, codes: tuple[str, ...]
) -> None:
    assert bytes_of_card(capability, amd=amd) == codes


@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("int", symmetric=False),
        ActivationScheme("int", group=64),
        ActivationScheme("int", 4),
        ActivationScheme("e4m3", group=32, rule="mx"),
        ActivationScheme("e4m3", rule="power"),
    ],
    ids=str,
)
def test_other_schemes_are_not_multiplied_as_bytes(cases: Any, scheme: ActivationScheme) -> None:
    linear = TritonLinearAsFile(FEW, BOTH)
    for layout in (integers(cases, scheme), floats(cases, scheme)):
        assert not multiplies_bytes(linear.pack(layout), scheme, BOTH)


def test_weights_or_cards_of_another_kind_do_not_multiply_bytes(cases: Any) -> None:
    linear = TritonLinearAsFile(FEW, BOTH)
    whole, eight = ActivationScheme("int"), ActivationScheme("e4m3")
    others = [
        cases.affine(20, 256, 4, 256, "zero"),
        cases.affine(20, 256, 8, 128, "zero", signed=True),
        cases.affine(20, 256, 8, 256, "zeros"),
        cases.affine(20, 256, 8, 256, "minus"),
        cases.float8(20, 192, (1, 192), torch.float8_e5m2),
        cases.float8(20, 256, (128, 128)),
    ]
    for layout in others:
        assert not multiplies_bytes(linear.pack(layout), whole, BOTH)
        assert not multiplies_bytes(linear.pack(layout), eight, BOTH)
    assert not multiplies_bytes(linear.pack(floats(cases, eight)), eight, ("int",))


@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("int"),
        ActivationScheme("int", static=0.03, zero=-40, symmetric=False),
        ActivationScheme("e4m3", group=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_file_gets_its_rounding_unless_exact_is_asked_for(
    cases: Any, scheme: ActivationScheme, tokens: int
) -> None:
    weights = [cases.affine(20, 96, 8, 96, "zero", signed=True), cases.float8(20, 96, (1, 96))]
    for layout in (replace(weight, inputs=scheme) for weight in weights):
        x = cases.activations(tokens, 96)
        for compute, name in (("auto", "gpu.linear_as_file"), ("exact", "gpu.linear_exact")):
            ops = Ops("cpu", compute=compute, backends=("gpu", "reference"))  # type: ignore[arg-type]
            bound = ops.linear(layout)
            assert bound.choice.name == name
            given = fake_quantize(x, scheme) if compute == "auto" else x
            expected = given.double() @ decode(layout).double().t()
            assert (bound.matmul(x) - expected).norm() < 1e-5 * expected.norm()
            assert cases.same(bound.layout(), layout)
            ops.close()
