"""What weights say of the rounding of their inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import ActivationScheme, Affine, inputs_of
from sdk.quant.permuted import PermutedWeight
from sdk.quant.quantize import quantize_without_data
from sdk.quant.scheme import Scheme
from sdk.quant.weight import StackedWeight, Weight, concat, weight_of

VALUES = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def integers(scheme: ActivationScheme | None) -> Weight:
    layout = quantize_without_data("w", VALUES, Scheme.parse("rtn-w8s"))
    assert isinstance(layout, Affine)
    return weight_of(replace(layout, inputs=scheme))


@pytest.mark.parametrize(
    ("name", "scheme", "spec"),
    [
        ("rtn-w8a8s", ActivationScheme("int"), "w8a8s"),
        ("rtn-w8s", None, "w8a16s"),
        ("fp8", None, "fp8"),
    ],
)
def test_what_is_packed_at_load_rounds_what_its_name_says(
    name: str, scheme: ActivationScheme | None, spec: str
) -> None:
    layout = quantize_without_data("w", VALUES, Scheme.parse(name))
    assert (inputs_of(layout), str(weight_of(layout).spec)) == (scheme, spec)


def test_a_stack_says_what_its_parts_say() -> None:
    schemes = (ActivationScheme("int"), ActivationScheme("e4m3", static=0.5), None)
    stack = concat([integers(scheme) for scheme in schemes])
    assert isinstance(stack, StackedWeight) and len(stack.parts) == 3
    assert stack.inputs == "int8 per token+e4m3 static"
    assert str(stack.spec) == "w8a8s+w8afp8s+w8a16s"


def test_parts_with_scales_of_their_own_multiply_rows_rounded_by_them() -> None:
    schemes = [ActivationScheme("int", static=scale) for scale in (0.5, 0.01)]
    parts = [integers(scheme) for scheme in schemes]
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    expected = [
        fake_quantize(x, scheme).double() @ part.dequantize().double().T
        for scheme, part in zip(schemes, parts, strict=True)
    ]
    stack, ops = concat(parts), Ops("cpu", num_threads=1)
    stack.bind(ops)
    found = stack.matmul(x)
    torch.testing.assert_close(found.double(), torch.cat(expected, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(stack.matmul(x[:1]), found[:1])
    ops.close()


def test_columns_in_another_order_are_rounded_all_the_same() -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2)).to(torch.int32)
    plain = integers(ActivationScheme("int"))
    weight = PermutedWeight(plain, order)
    assert weight.inputs == "int8 per token" and str(weight.spec) == "w8a8s"
    x, value = torch.randn(5, 64), weight.dequantize()
    ops = Ops("cpu", num_threads=1)
    weight.bind(ops)
    expected = fake_quantize(x, ActivationScheme("int")).double() @ value.double().T
    torch.testing.assert_close(weight.matmul(x).double(), expected, rtol=1e-5, atol=1e-5)
    ops.close()
