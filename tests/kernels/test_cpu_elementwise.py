"""The native norms and activations at every SIMD level, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from sdk.kernels.backend import Problem
from sdk.kernels.cpu import CpuBackend
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops

WIDTHS = (1, 5, 8, 16, 77, 576, 1000)


def forms(*shape: int) -> list[Norm]:
    """Norms of every form, with weights of ``shape``."""
    weight, bias = torch.rand(shape), torch.randn(shape[-1])
    return [
        Norm(own, 1e-5, shift, centred)
        for own in (weight, None)
        for shift in (bias, None)
        for centred in (True, False)
    ]


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """A row of one number minus its mean is zero."""
    return bool((found - exact).norm() <= 1e-6 * exact.norm())


def exact_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    x = x.double()
    if norm.centred:
        x = x - x.mean(dim=-1, keepdim=True)
    x = x * (x.square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt()
    x = x if norm.weight is None else x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_match_float64(backend: CpuBackend, cases: Any, width: int) -> None:
    (kernel,) = backend.implementations("norm")
    x = cases.activations(7, width)
    for norm in forms(width):
        out = torch.empty_like(x)
        kernel.run(x, norm, out)
        assert close(out, exact_norm(x, norm)), norm.form


@pytest.mark.parametrize("width", [5, 128])
def test_each_head_has_the_norm_of_its_own_weight(
    backend: CpuBackend, cases: Any, width: int
) -> None:
    (kernel,) = backend.implementations("norm")
    heads = cases.activations(7, 5 * width).view(7, 5, width)[:, 1:4]  # of a wider projection
    for norm in forms(3, width):
        out = torch.empty(7, 3, width)
        kernel.run(heads, norm, out)
        assert close(out, exact_norm(heads, norm)), norm.form


def test_layer_norm_of_large_numbers_close_to_each_other(backend: CpuBackend) -> None:
    """Their variance is 1, which the mean of their squares, 1e8, has no room for in float32."""
    (kernel,) = backend.implementations("norm")
    x = 1e4 + torch.randn(3, 576).round(decimals=2)
    out = torch.empty_like(x)
    norm = Norm(torch.ones(576), 1e-5, centred=True)
    kernel.run(x, norm, out)
    assert (out.double() - exact_norm(x, norm)).abs().max() < 2e-3


@pytest.mark.parametrize("width", WIDTHS)
def test_adding_the_residual_first_gives_the_same_norm(
    backend: CpuBackend, cases: Any, width: int
) -> None:
    (plain,) = backend.implementations("norm")
    (adding,) = backend.implementations("add_norm")
    x = cases.activations(7, width)
    for norm in forms(width):
        residual = cases.activations(7, width, seed=2)
        total = x + residual
        out, expected = torch.empty_like(x), torch.empty_like(x)
        adding.run(x, residual, norm, out)
        plain.run(total, norm, expected)
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


NUMBERS = (0.75, 1.25, 0.5, -1e-6)


def exact_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    x = x.double()
    p, n, b, eps = NUMBERS
    negative = n * (torch.expm1(x.clamp(max=eps)) - x)
    return {
        "silu": F.silu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
        "gelu": F.gelu(x),
        "relu": F.relu(x),
        "relu2": F.relu(x) ** 2,
        "xielu": torch.where(x > 0, p * x * x, negative) + b * x,
    }[kind]


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"])
def test_an_activation_without_a_gate_matches_float64(backend: CpuBackend, kind: str) -> None:
    (kernel,) = backend.implementations("activation")
    (gated,) = backend.implementations("gated_activation")
    spread = torch.linspace(-12, 12, 5001), torch.logspace(-8, 0, 300), -torch.logspace(-8, 0, 300)
    x = torch.cat((*spread, torch.tensor([-200.0, 200.0, -1e30, 0.0])))
    numbers = NUMBERS if kind == "xielu" else ()
    found = x.clone().unsqueeze(0)
    kernel.run(found, kind, found, numbers)
    exact = exact_activation(x, kind)
    scale = torch.maximum(exact.abs(), x.double().abs())
    assert ((found[0].double() - exact).abs() <= 1e-6 * scale + 1e-12).all()
    both = torch.empty_like(found)
    gated.run(torch.cat((x, torch.ones_like(x))).unsqueeze(0), kind, both, numbers)
    assert torch.equal(both, found)


def test_nan_stays_nan(backend: CpuBackend) -> None:
    (plain,) = backend.implementations("activation")
    for kind in ("silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"):
        x = torch.ones(1, 20)
        x[0, 3] = x[0, 19] = float("nan")
        plain.run(x, kind, x, NUMBERS if kind == "xielu" else ())
        assert x[0].isnan().nonzero().flatten().tolist() == [3, 19]
    (kernel,) = backend.implementations("gated_activation")
    (gating,) = backend.implementations("gate")
    for name in ("sigmoid", "softplus", "silu", "linear"):
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
    (norm,) = backend.implementations("norm")
    (gated,) = backend.implementations("gated_activation")
    x, layer_norm = cases.activations(500, 576), forms(576)[0]
    full, half = torch.empty(500, 576), torch.empty(500, 288)
    norm.run(x, layer_norm, full)
    gated.run(x, "silu", half)
    for row in (0, 17, 499):
        one, one_half = torch.empty(1, 576), torch.empty(1, 288)
        norm.run(x[row : row + 1], layer_norm, one)
        gated.run(x[row : row + 1], "silu", one_half)
        assert torch.equal(one[0], full[row])
        assert torch.equal(one_half[0], half[row])


@pytest.mark.parametrize("kind", ["sigmoid", "softplus", "silu", "linear"])
@pytest.mark.parametrize("width", [1, 24])
def test_a_gate_matches_float64(backend: CpuBackend, kind: str, width: int) -> None:
    """Of each number, or of runs of them as of heads; rows of the gate lie in wider ones."""
    (kernel,) = backend.implementations("gate")
    wide = torch.cat((torch.linspace(-30, 30, 401), torch.tensor([-200.0, 200.0, 0.0, 1e-9])))
    gate = torch.stack((wide, wide.flip(0), torch.zeros(405)))[:, 3:]
    x = torch.randn(3, 402 * width, generator=torch.Generator().manual_seed(1))
    out = x.clone()
    kernel.run(out, gate, kind)
    of = {"sigmoid": torch.sigmoid, "softplus": F.softplus, "silu": F.silu}
    factor = of.get(kind, lambda given: given)(gate.double())
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
    names = "silu, gelu_tanh, gelu, clamped_swiglu, relu, relu2, xielu"
    reason = kernel.reject(Problem("gated_activation", format="elu"))
    assert reason == f"activation 'elu': expected one of {names}"
    assert kernel.reject(Problem("gated_activation", format="silu")) is None
    (plain,) = backend.implementations("activation")
    reason = plain.reject(Problem("activation", format="clamped_swiglu"))
    names = names.replace("clamped_swiglu, ", "")
    assert reason == f"activation 'clamped_swiglu': expected one of {names}"


def test_wrong_arguments_raise(backend: CpuBackend) -> None:
    (norm,) = backend.implementations("norm")
    (adding,) = backend.implementations("add_norm")
    x, out = torch.zeros(2, 8), torch.zeros(2, 8)
    seven = torch.ones(7)
    with pytest.raises(KernelError, match=r"norm: expected a contiguous weight \[8\], found \[7\]"):
        norm.run(x, Norm(seven, 1e-5), out)
    with pytest.raises(KernelError, match=r"norm: expected a contiguous bias \[8\], found \[7\]"):
        norm.run(x, Norm(None, 1e-5, seven), out)
    with pytest.raises(KernelError, match="norm weight: expected float32 on cpu"):
        norm.run(x, Norm(torch.ones(8, dtype=torch.float16), 1e-5), out)
    (activation,) = backend.implementations("activation")
    with pytest.raises(KernelError, match=r"activation: expected contiguous rows, found \(1, 2\)"):
        activation.run(x.view(8, 2).T, "relu", out)
    (take,) = backend.implementations("take_columns")
    for order in (torch.zeros(7).int(), torch.zeros(8).long(), torch.zeros(16).int()[::2]):
        with pytest.raises(KernelError, match=r"take_columns: expected an int32 order \[8\]"):
            take.run(x, order, False, out)
    for bad in (-1, 8):
        with pytest.raises(KernelError, match=r"take_columns: .* lies outside of its tensor"):
            take.run(x, torch.tensor([0, 1, 2, bad, 4, 5, 6, 7]).int(), False, out)
    with pytest.raises(KernelError, match="add_norm: expected a contiguous residual"):
        adding.run(x, torch.zeros(8, 2).T, Norm(torch.ones(8), 1e-5), out)


@pytest.mark.parametrize("backends", [["reference"], ["cpu"]])
def test_rows_are_placed_where_an_index_says(backends: list[str]) -> None:
    """Rows with others between them, as the vectors of one token in the image cache."""
    ops = Ops("cpu", backends=backends, num_threads=2)
    wide = torch.randn(50, 3 * 40, generator=torch.Generator().manual_seed(0))
    rows, x = wide[:, 40:80], torch.randn(300, 40, generator=torch.Generator().manual_seed(1))
    index = torch.randint(-1, 50, (300,), generator=torch.Generator().manual_seed(2)).int()
    taken = index >= 0
    assert taken.any() and not taken.all()
    wanted = x.clone()
    wanted[taken] = rows[index[taken].long()]
    assert torch.equal(ops.place_rows(x.clone(), rows, index), wanted)
    wanted = x.clone()
    wanted[taken] += rows[index[taken].long()]
    assert torch.equal(ops.place_rows(x.clone(), rows, index, add=True), wanted)
    assert ops.place_rows(x[:0], rows, index[:0]).shape == (0, 40)
    with pytest.raises(KernelError, match=r"place_rows rows: expected torch.float32 \[any, 40\]"):
        ops.place_rows(x, wide, index)
    with pytest.raises(KernelError, match="place_rows index"):
        ops.place_rows(x, rows, index.long())
    if backends == ["cpu"]:
        with pytest.raises(KernelError, match="place_rows: expected contiguous x"):
            ops.place_rows(wide[:, 40:80], rows, index[:50])
    ops.close()


def test_placing_rows_is_part_of_a_recorded_step() -> None:
    """A replay reads the index that is there then."""
    ops = Ops("cpu", num_threads=2)
    rows = torch.arange(6.0).view(3, 2)
    index = torch.full((4,), -1, dtype=torch.int32)
    source = torch.ones(4, 2)

    def step() -> torch.Tensor:
        return ops.place_rows(ops.add(ops.zeros(4, 2), source), rows, index)

    with torch.inference_mode():
        graph = ops.recording.capture(step, tokens=4, outputs=4, requests=4)
    graph.replay(tokens=4, outputs=4, requests=4)
    assert torch.equal(graph.result, source)
    index[2] = 1
    graph.replay(tokens=4, outputs=4, requests=4)
    assert graph.result.tolist() == [[1, 1], [1, 1], [2, 3], [1, 1]]
    index[1] = 3
    with pytest.raises(KernelError, match="lies outside"):
        graph.replay(tokens=4, outputs=4, requests=4)
    ops.close()
