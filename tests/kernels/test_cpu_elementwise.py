"""The native norms and activations at every SIMD level, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sdk.kernels.backend import Problem
from sdk.kernels.cpu import CpuBackend
from sdk.kernels.errors import KernelError

WIDTHS = (1, 5, 8, 16, 77, 576, 1000)


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_matches_float64(backend: CpuBackend, cases: Any, width: int) -> None:
    (kernel,) = backend.implementations("rms_norm")
    x, weight = cases.activations(7, width), torch.rand(width)
    out = torch.empty_like(x)
    kernel.run(x, weight, 1e-5, out)
    double = x.double()
    scale = (double.square().mean(dim=1, keepdim=True) + 1e-5).rsqrt()
    assert cases.nmse(out, double * scale * weight.double()) < 1e-12


@pytest.mark.parametrize("width", WIDTHS)
def test_adding_the_residual_first_gives_the_same_norm(
    backend: CpuBackend, cases: Any, width: int
) -> None:
    (plain,) = backend.implementations("rms_norm")
    (adding,) = backend.implementations("add_rms_norm")
    x, residual = cases.activations(7, width), cases.activations(7, width, seed=2)
    weight, total = torch.rand(width), x + residual
    out, expected = torch.empty_like(x), torch.empty_like(x)
    adding.run(x, residual, weight, 1e-5, out)
    plain.run(total, weight, 1e-5, expected)
    assert torch.equal(residual, total)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "clamped_swiglu"])
def test_gated_activation_matches_float64(backend: CpuBackend, cases: Any, kind: str) -> None:
    (kernel,) = backend.implementations("gated_activation")
    gate = torch.cat((torch.linspace(-12, 12, 5001), torch.tensor([-200.0, 200.0, -1e30, 0.0])))
    up = 3.0 * torch.randn(gate.shape[0])
    out = torch.empty(1, gate.shape[0])
    kernel.run(torch.cat((gate, up)).unsqueeze(0), kind, out)
    g = gate.double()
    if kind == "clamped_swiglu":
        g, up = g.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
    activated = {
        "silu": F.silu(g),
        "gelu_tanh": F.gelu(g, approximate="tanh"),
        "gelu": F.gelu(g),
        "clamped_swiglu": g * torch.sigmoid(1.702 * g),
    }[kind]
    error = (out[0].double() - activated * up.double()).abs()
    assert (error <= 1e-6 * (up.double() * g).abs() + 1e-12).all()


def test_nan_stays_nan(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("gated_activation")
    (gating,) = backend.implementations("gate")
    for name in ("sigmoid", "softplus"):
        for gates in (40, 2):
            x, gate = torch.ones(1, 40), torch.ones(1, gates)
            gate[0, 1] = float("nan")
            gating.run(x, gate, name)
            assert x.isnan().sum() == 40 // gates and x[0, 40 // gates].isnan()
    for kind in ("silu", "gelu_tanh", "gelu", "clamped_swiglu"):
        out = torch.empty(1, 20)
        gate_up = torch.ones(1, 40)
        gate_up[0, 3] = gate_up[0, 39] = float("nan")
        kernel.run(gate_up, kind, out)
        assert out[0].isnan().nonzero().flatten().tolist() == [3, 19]


def test_a_row_has_the_same_bits_in_every_batch(backend: CpuBackend, cases: Any) -> None:
    (norm,) = backend.implementations("rms_norm")
    (gated,) = backend.implementations("gated_activation")
    x, weight = cases.activations(500, 576), torch.rand(576)
    full, half = torch.empty(500, 576), torch.empty(500, 288)
    norm.run(x, weight, 1e-5, full)
    gated.run(x, "silu", half)
    for row in (0, 17, 499):
        one, one_half = torch.empty(1, 576), torch.empty(1, 288)
        norm.run(x[row : row + 1], weight, 1e-5, one)
        gated.run(x[row : row + 1], "silu", one_half)
        assert torch.equal(one[0], full[row])
        assert torch.equal(one_half[0], half[row])


@pytest.mark.parametrize("kind", ["sigmoid", "softplus"])
@pytest.mark.parametrize("width", [1, 24])
def test_a_gate_matches_float64(backend: CpuBackend, kind: str, width: int) -> None:
    """Of each number, or of runs of them as of heads; rows of the gate lie in wider ones."""
    (kernel,) = backend.implementations("gate")
    wide = torch.cat((torch.linspace(-30, 30, 401), torch.tensor([-200.0, 200.0, 0.0, 1e-9])))
    gate = torch.stack((wide, wide.flip(0), torch.zeros(405)))[:, 3:]
    x = torch.randn(3, 402 * width, generator=torch.Generator().manual_seed(1))
    out = x.clone()
    kernel.run(out, gate, kind)
    factor = (torch.sigmoid if kind == "sigmoid" else F.softplus)(gate.double())
    wanted = (x.double().view(3, 402, width) * factor.unsqueeze(2)).view(3, -1)
    assert ((out.double() - wanted).abs() <= 1e-6 * wanted.abs() + 1e-12).all()
    one = x[1:2].clone()
    kernel.run(one, gate[1:2], kind)
    assert torch.equal(one[0], out[1])


def test_a_gate_that_does_not_fit_is_refused(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("gate")
    x, gate = torch.ones(2, 12), torch.ones(2, 4)
    for wrong in (torch.ones(2, 5), torch.ones(3, 4)):
        with pytest.raises(KernelError, match=r"gate: expected \d contiguous rows of runs of"):
            kernel.run(x, wrong, "sigmoid")
    for given in ((x.double(), gate), (x, gate.half()), (x, torch.ones(4, 2).t())):
        with pytest.raises(KernelError, match=r"gate (x|gate): expected float32 rows, found"):
            kernel.run(*given, "sigmoid")


@pytest.mark.parametrize("width", WIDTHS)
def test_columns_are_taken_in_any_order_and_put_back(
    backend: CpuBackend, cases: Any, width: int
) -> None:
    (kernel,) = backend.implementations("take_columns")
    x, order = cases.activations(7, width), torch.randperm(width)
    taken, back = torch.empty_like(x), torch.empty_like(x)
    kernel.run(x, order.int(), False, taken)
    assert torch.equal(taken, x[:, order])
    kernel.run(taken, order.int(), True, back)
    assert torch.equal(back, x)


def test_unknown_activations_are_declined(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("gated_activation")
    reason = kernel.reject(Problem("gated_activation", format="relu"))
    assert reason == "activation 'relu': expected one of silu, gelu_tanh, gelu, clamped_swiglu"
    assert kernel.reject(Problem("gated_activation", format="silu")) is None


def test_wrong_arguments_raise(backend: CpuBackend) -> None:
    (norm,) = backend.implementations("rms_norm")
    (adding,) = backend.implementations("add_rms_norm")
    x, out = torch.zeros(2, 8), torch.zeros(2, 8)
    with pytest.raises(KernelError, match=r"rms_norm: expected weight \[8\], found \[7\]"):
        norm.run(x, torch.ones(7), 1e-5, out)
    with pytest.raises(KernelError, match="rms_norm weight: expected float32 on cpu"):
        norm.run(x, torch.ones(8, dtype=torch.float16), 1e-5, out)
    (take,) = backend.implementations("take_columns")
    for order in (torch.zeros(7).int(), torch.zeros(8).long(), torch.zeros(16).int()[::2]):
        with pytest.raises(KernelError, match=r"take_columns: expected an int32 order \[8\]"):
            take.run(x, order, False, out)
    for bad in (-1, 8):
        with pytest.raises(KernelError, match=r"take_columns: .* lies outside of its tensor"):
            take.run(x, torch.tensor([0, 1, 2, bad, 4, 5, 6, 7]).int(), False, out)
    with pytest.raises(KernelError, match="add_rms_norm: expected a contiguous residual"):
        adding.run(x, torch.zeros(8, 2).T, torch.ones(8), 1e-5, out)
