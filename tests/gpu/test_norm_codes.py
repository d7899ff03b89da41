"""Norms whose results are codes: those of the norm that is written, read and rounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.gpu import linear_as_file
from sdk.kernels.gpu.byte_rows import ALIGNED, STEP
from sdk.kernels.gpu.linear_as_file import round_rows
from sdk.kernels.gpu.norm import AddNormalize, Normalize
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rounded
from sdk.kernels.weights.layouts import ActivationScheme

SCHEMES = {
    "int8 per token": ActivationScheme("int"),
    "e4m3 per token, limited": ActivationScheme("e4m3", limit=1.5),
    "int8 static": ActivationScheme("int", static=0.02),
    "e4m3 static": ActivationScheme("e4m3", static=0.01),
    "e4m3 per 128": ActivationScheme("e4m3", group=STEP),
    "e4m3 per 128, powers of two": ActivationScheme("e4m3", group=STEP, rule="power"),
}


def codes_for(scheme: ActivationScheme, rows: int, width: int) -> Rounded:
    padded = -(-width // ALIGNED) * ALIGNED
    dtype = torch.float8_e4m3fn if scheme.floats else torch.int8
    groups = -(-padded // STEP) if scheme.group else 1
    codes = torch.full((rows, padded), 3, dtype=torch.int8).view(dtype)
    return Rounded(codes, torch.full((groups, rows), torch.nan), width)


def apart(norm: Tensor, scheme: ActivationScheme) -> Rounded:
    out = codes_for(scheme, *norm.shape)
    round_rows(norm, out.codes, out.scales, scheme).run()
    return out


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("short", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(("rows", "width"), [(1, 256), (5, 90), (3, 1300)])
def test_codes_are_those_of_the_norm(rows: int, width: int, name: str, short: torch.dtype) -> None:
    scheme = SCHEMES[name]
    random = torch.Generator().manual_seed(rows + width)
    x = torch.randn(rows, width, generator=random).to(short)
    residual, weight = torch.randn(rows, width), torch.rand(width) + 0.5
    norm, sums = torch.empty(rows, width, dtype=short), residual.clone()
    AddNormalize().run(x, sums, Norm(weight, 1e-5), norm)
    found, own = codes_for(scheme, rows, width), residual.clone()
    AddNormalize().run_rounded(x, own, Norm(weight, 1e-5), found, scheme, short)
    wanted = apart(norm, scheme)
    assert torch.equal(own, sums)
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.codes.view(torch.int8), wanted.codes.view(torch.int8))

    Normalize().run(x.float(), Norm(weight, 1e-5), norm)  # of embeddings, without a residual
    Normalize().run_rounded(x.float(), Norm(weight, 1e-5), found, scheme, short)
    wanted = apart(norm, scheme)
    assert torch.equal(found.scales, wanted.scales)
    assert torch.equal(found.codes.view(torch.int8), wanted.codes.view(torch.int8))


@pytest.mark.parametrize("group", [0, STEP])
def test_a_row_that_is_not_finite_has_a_scale_that_is_not(group: int) -> None:
    scheme = ActivationScheme("e4m3", group=group)
    x = torch.randn(3, 256)
    x[1, 7] = torch.inf
    found = codes_for(scheme, 3, 256)
    Normalize().run_rounded(x, Norm(torch.ones(256), 1e-5), found, scheme, torch.float32)
    assert found.scales[:, [0, 2]].isfinite().all()
    assert found.scales[:, 1].isnan().any()


def test_a_projection_multiplies_codes_as_it_does_rows(cases: Any) -> None:
    ops = Ops("cpu", backends=("gpu", "reference"))
    integers = cases.affine(37, 256, 8, 256, "zero", torch.float32, signed=True)
    for layout in (
        replace(integers, inputs=ActivationScheme("int")),
        replace(cases.float8(20, 256, (1, 256)), inputs=ActivationScheme("e4m3")),
        replace(cases.float8(150, 256, (128, 128)), inputs=ActivationScheme("e4m3", group=128)),
    ):
        bound = ops.linear(layout)
        assert bound.rounding is not None, layout
        x, residual, weight = torch.randn(4, 256), torch.randn(4, 256), torch.ones(256)
        norm, sums = ops.add_norm(x, residual.clone(), Norm(weight, 1e-5))
        codes, own = ops.add_norm_for(bound.rounding, x, residual.clone(), Norm(weight, 1e-5))
        assert isinstance(codes, Rounded)
        assert torch.equal(own, sums)
        assert torch.equal(bound.matmul(codes), bound.matmul(norm))
    ops.close()


def test_codes_are_multiplied_some_rows_at_a_time_as_all_at_once(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = Ops("cpu", backends=("gpu", "reference"))
    scheme = ActivationScheme("e4m3", group=STEP)
    bound = ops.linear(replace(cases.float8(150, 256, (128, 128)), inputs=scheme))
    x, weight = torch.randn(40, 256), torch.ones(256)
    codes, _ = ops.add_norm_for(bound.rounding, x, None, Norm(weight, 1e-5))
    norm, _ = ops.add_norm(x, None, Norm(weight, 1e-5))
    assert isinstance(codes, Rounded) and codes.scales.shape == (2, 40)
    monkeypatch.setattr(linear_as_file, "rows_of_codes", lambda k: 16)
    assert torch.equal(bound.matmul(codes), bound.matmul(norm))
    ops.close()
