"""Norms, activations and the small row-wise operators under the Triton interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.elementwise import (
    ACTIVATIONS,
    MAPS,
    Activate,
    Map,
    PlaceRows,
    SelectRows,
    TakeColumns,
)
from sdk.kernels.gpu.norm import AddNormalize, Normalize
from sdk.kernels.operators.mlp_activations import ALWAYS_GATED
from sdk.kernels.operators.norm import Norm
from sdk.kernels.reference.norm import Normalize as ReferenceNorm


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 64), (5, 576), (2, 5000), (3, 7, 80)])
def test_rms_norm_is_the_definition(shape: tuple[int, ...]) -> None:
    wide = normal(*shape[:-1], shape[-1] + 16)
    x = wide[..., : shape[-1]]  # strided, as heads of a fused projection are
    weight = normal(shape[-1], seed=1)
    out = torch.empty(shape)
    Normalize().run(x, Norm(weight, 1e-5), out)
    exact = x.double()
    close(out, exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


def test_the_residual_is_added_before_the_norm_and_kept() -> None:
    x, residual, weight = normal(3, 100), normal(3, 100, seed=1), normal(100, seed=2)
    total = (x.double() + residual.double()).float()
    out, apart = torch.empty(3, 100), torch.empty(3, 100)
    AddNormalize().run(x, residual, Norm(weight, 1e-6), out)
    assert torch.equal(residual, total)
    Normalize().run(total, Norm(weight, 1e-6), apart)
    assert torch.equal(out, apart)


def test_a_row_s_norm_does_not_depend_on_the_others() -> None:
    x, weight = normal(9, 96), normal(96, seed=1)
    out, alone = torch.empty(9, 96), torch.empty(1, 96)
    Normalize().run(x, Norm(weight, 1e-5), out)
    Normalize().run(x[4:5], Norm(weight, 1e-5), alone)
    assert torch.equal(alone[0], out[4])


def test_rows_that_cannot_be_normed_are_refused() -> None:
    weight = torch.ones(8)
    with pytest.raises(KernelError, match="at most 3 dimensions"):
        Normalize().run(torch.ones(4, 16)[:, ::2], Norm(weight, 1e-5), torch.empty(4, 8))
    with pytest.raises(KernelError, match="contiguous residual"):
        AddNormalize().run(
            torch.ones(4, 8), torch.ones(8, 4).t(), Norm(weight, 1e-5), torch.empty(4, 8)
        )


NUMBERS = (0.75, 1.25, 0.5, -1e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("width", [3, 1500])
def test_activations_are_the_definition(kind: str, width: int) -> None:
    x = normal(2, 2 * width) * 4
    x[0, :3] = torch.tensor([-200.0, 200.0, -1e-3])
    gate, up = x.double().chunk(2, dim=1)
    numbers = NUMBERS if kind == "xielu" else ()
    p, n, b, eps = NUMBERS
    negative = n * (torch.expm1(gate.clamp(max=eps)) - gate)
    definitions: dict[str, Any] = {
        "relu": lambda: F.relu(gate) * up,
        "relu2": lambda: F.relu(gate).square() * up,
        "xielu": lambda: (torch.where(gate > 0, p * gate * gate, negative) + b * gate) * up,
        "silu": lambda: F.silu(gate) * up,
        "gelu": lambda: F.gelu(gate) * up,
        "gelu_tanh": lambda: F.gelu(gate, approximate="tanh") * up,
        "clamped_swiglu": lambda: (
            gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)
        ),
    }
    out = torch.empty(2, width)
    Activate(gated=True).run(x, kind, out, numbers)
    torch.testing.assert_close(out.double(), definitions[kind](), rtol=3e-6, atol=2e-5)
    if kind in ALWAYS_GATED:
        return
    up = torch.ones_like(gate)
    alone = gate.float().contiguous()
    Activate(gated=False).run(alone, kind, alone, numbers)
    torch.testing.assert_close(alone.double(), definitions[kind](), rtol=3e-6, atol=2e-6)


def test_an_unknown_activation_is_declined() -> None:
    gated, plain = Activate(gated=True), Activate(gated=False)
    assert "'elu'" in str(gated.reject(Problem("gated_activation", format="elu")))
    assert gated.reject(Problem("gated_activation", format="gelu")) is None
    assert "'clamped_swiglu'" in str(plain.reject(Problem("activation", format="clamped_swiglu")))
    with pytest.raises(KernelError, match="activation: expected contiguous rows"):
        plain.run(torch.ones(4, 8).t(), "relu", torch.ones(8, 4))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_norms_of_every_form_are_the_definition(centred: bool, biased: bool) -> None:
    wide = normal(6, 5 * 100).view(6, 5, 100) + 3
    heads = wide[:, 1:4]
    bias = normal(100, seed=5) if biased else None
    for weight in (None, normal(100, seed=3), normal(3, 100, seed=4)):
        norm = Norm(weight, 1e-5, bias, centred)
        out, wanted = torch.empty(6, 3, 100), torch.empty(6, 3, 100)
        Normalize().run(heads, norm, out)
        ReferenceNorm().run(heads, norm, wanted)
        torch.testing.assert_close(out, wanted, rtol=2e-6, atol=4e-6)
    x, sums = wide.flatten(1), normal(6, 500, seed=7)
    norm = Norm(normal(500, seed=8), 1e-5, normal(500, seed=9) if biased else None, centred)
    own, out, wanted = sums.clone(), torch.empty(6, 500), torch.empty(6, 500)
    AddNormalize().run(x, sums, norm, out)
    ReferenceNorm().run(own + x, norm, wanted)
    assert torch.equal(sums, own + x)
    torch.testing.assert_close(out, wanted, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("kind", MAPS)
def test_maps_change_their_rows_in_place(kind: str) -> None:
    x, other, bias = normal(3, 700), normal(3, 700, seed=1), normal(700, seed=2)
    before = x.double()
    wanted = {
        "zeros": before * 0,
        "add": before + other.double(),
        "add_bias": before + bias.double(),
        "scale": before * 0.3,
        "softcap": torch.tanh(before / 0.3) * 0.3,
        "clamp": before.clamp(-0.3, 0.3),
    }[kind]
    Map(kind).run(x, {"add": other, "add_bias": bias}.get(kind), 0.3)
    close(x, wanted)


def test_a_map_of_rows_apart_is_refused() -> None:
    with pytest.raises(KernelError, match="contiguous rows"):
        Map("scale").run(torch.ones(4, 8)[:, :4], None, 2.0)


@pytest.mark.parametrize("add", [False, True])
def test_rows_are_placed_where_an_index_says(add: bool) -> None:
    x, rows = normal(4, 1100), normal(3, 1103)[:, 3:]
    before, index = x.clone(), torch.tensor([2, -1, 0, 3], dtype=torch.int32)
    PlaceRows().run(x, rows, index, add)
    for row, source in ((0, 2), (2, 0)):
        assert torch.equal(x[row], before[row] + rows[source] if add else rows[source])
    assert torch.equal(x[[1, 3]], before[[1, 3]])  # none, and one that does not exist
    with pytest.raises(KernelError, match="contiguous rows"):
        PlaceRows().run(x[:, :7], rows[:, :7], index, add)


def test_rows_and_columns_are_taken_as_they_are() -> None:
    x = normal(5, 1100)
    rows = torch.tensor([4, 0, 4])
    out = torch.empty(3, 1100)
    SelectRows().run(x, rows, out)
    assert torch.equal(out, x[rows])
    order = torch.randperm(1100, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    taken, back = torch.empty(5, 1100), torch.empty(5, 1100)
    TakeColumns().run(x, order, False, taken)
    assert torch.equal(taken, x[:, order.long()])
    TakeColumns().run(taken, order, True, back)
    assert torch.equal(back, x)
