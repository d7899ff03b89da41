"""Activations rounded as files ask for, on the GPU's kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sdk.kernels.layouts import ActivationScheme
from sdk.kernels.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.rounding import rounded


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
            given = rounded(x, scheme) if compute == "auto" else x
            expected = given.double() @ decode(layout).double().t()
            assert (bound.matmul(x) - expected).norm() < 1e-5 * expected.norm()
            assert cases.same(bound.layout(), layout)
            ops.close()
