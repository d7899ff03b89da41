"""The small operators around recurrences: rates, and norms with a gate."""

from __future__ import annotations

import pytest
import torch

from sdk.kernels.errors import KernelError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops


@pytest.fixture
def ops(each_ops: Ops) -> Ops:
    return each_ops


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("width", [1, 6, 35, 64])
def test_rates_are_those_of_published_models(ops: Ops, width: int) -> None:
    """Of a view of a wider projection; each row as if it were alone."""
    wide, bias = _x(7, width + 9), _x(width, seed=1)
    wide[0, 3], wide[1, 3], wide[2, 3] = 90.0, -90.0, -20.0
    x, a_log = wide[:, 3 : 3 + width], _x(width, seed=2).abs().log()
    decay = ops.states.rates(x, "softplus", bias=bias, factor=-a_log.exp())
    exact = torch.nn.functional.softplus(x.double() + bias.double())
    torch.testing.assert_close(decay.double(), exact * -a_log.exp().double(), rtol=1e-6, atol=1e-37)
    dt = ops.states.rates(x, "softplus", bias=bias, limits=(0.001, 5.0))
    torch.testing.assert_close(dt.double(), exact.clamp(0.001, 5.0), rtol=1e-6, atol=0)
    beta = ops.states.rates(x, "sigmoid", factor=torch.full((1,), 2.0))
    torch.testing.assert_close(beta.double(), 2 * x.double().sigmoid(), rtol=1e-6, atol=1e-37)
    for t in range(7):
        alone = ops.states.rates(x[t : t + 1], "softplus", bias=bias, factor=-a_log.exp())
        assert torch.equal(alone[0], decay[t])


def test_a_factor_may_be_of_a_head(ops: Ops) -> None:
    x, factor = _x(3, 40), _x(5, seed=3)
    found = ops.states.rates(x, "sigmoid", factor=factor)
    expected = x.view(3, 5, 8).sigmoid() * factor[:, None]
    torch.testing.assert_close(found, expected.view(3, 40), rtol=1e-6, atol=1e-7)


def test_rates_keep_a_nan(ops: Ops) -> None:
    x = torch.full((2, 33), float("nan"))
    x[1] = 0.5
    for kind in ("sigmoid", "softplus"):
        found = ops.states.rates(x, kind, limits=(0.1, 3.0))  # type: ignore[arg-type]
        assert found[0].isnan().all() and not found[1].isnan().any()


@pytest.mark.parametrize("kind", ["silu", "sigmoid"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("heads", "width"), [(1, 7), (3, 16), (4, 128), (2, 45)])
def test_a_gated_norm_is_a_norm_with_a_gate(
    ops: Ops, kind: str, first: bool, heads: int, width: int
) -> None:
    """Of views of a projection; each row as if it were alone."""
    both = _x(5, heads, 2 * width)
    x, gate = both[:, :, :width], both[:, :, width:]
    for weight in (None, _x(width, seed=4), _x(heads, width, seed=5)):
        norm = Norm(weight, 1e-5)
        found = ops.states.gated_norm(x, gate, norm, kind, first=first)  # type: ignore[arg-type]
        factor = gate.double().sigmoid() * (gate.double() if kind == "silu" else 1.0)
        y = x.double() * factor if first else x.double()
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-5)
        y = y if weight is None else y * weight.double()
        expected = y if first else y * factor
        torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=1e-6)
        alone = ops.states.gated_norm(x[2:3], gate[2:3], norm, kind, first=first)  # type: ignore[arg-type]
        assert torch.equal(alone[0], found[2])


def test_gated_norms_are_those_of_transformers(ops: Ops) -> None:
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    x, gate, weight = _x(4, 48, seed=6), _x(4, 48, seed=7), _x(48, seed=8)
    groups = MambaRMSNormGated(48, 16)
    groups.weight.data = weight
    norm = Norm(weight.view(3, 16), 1e-6)
    found = ops.states.gated_norm(x.view(4, 3, 16), gate.view(4, 3, 16), norm, first=True)
    torch.testing.assert_close(found.view(4, 48), groups(x, gate).detach(), rtol=2e-5, atol=1e-6)
    head = Qwen3NextRMSNormGated(16, eps=1e-6)
    head.weight.data = weight[:16].clone()
    x, gate = x.view(4, 3, 16), gate.view(4, 3, 16)
    found = ops.states.gated_norm(x, gate, Norm(weight[:16], 1e-6))
    torch.testing.assert_close(found, head(x, gate).detach(), rtol=2e-5, atol=1e-6)


def test_nothing_is_nothing(ops: Ops) -> None:
    assert ops.states.rates(torch.zeros(0, 4), "sigmoid").shape == (0, 4)
    empty = torch.zeros(0, 2, 4)
    assert ops.states.gated_norm(empty, empty, Norm(None, 1e-6)).shape == (0, 2, 4)


def test_what_does_not_fit_is_named(ops: Ops) -> None:
    x, three = torch.zeros(2, 6), torch.zeros(2, 3, 4)
    plain = Norm(None, 1e-6)
    for what, call in {
        "rates x: expected": lambda: ops.states.rates(x[0], "sigmoid"),
        "rates x: expected contiguous rows": lambda: ops.states.rates(x.t(), "sigmoid"),
        "rates kind: expected one of sigmoid, softplus, tanh, found 'relu'": lambda: (
            ops.states.rates(x, "relu")
        ),
        "rates bias": lambda: ops.states.rates(x, "sigmoid", bias=torch.zeros(5)),
        "rates factor: expected one for equal runs of 6 columns, found 4": lambda: ops.states.rates(
            x, "sigmoid", factor=torch.zeros(4)
        ),
        "rates limits: .*found .1.0, 0.0.": lambda: ops.states.rates(
            x, "sigmoid", limits=(1.0, 0.0)
        ),
        "gated_norm x": lambda: ops.states.gated_norm(x, x, plain),
        "gated_norm gate": lambda: ops.states.gated_norm(three, three[:, :2], plain),
        "gated_norm weight": lambda: ops.states.gated_norm(
            three, three, Norm(torch.zeros(2, 4), 1e-6)
        ),
        "expected an RMSNorm without a bias": lambda: ops.states.gated_norm(
            three, three, Norm(None, 1e-6, centred=True)
        ),
        "gated_norm kind: expected one of silu, sigmoid, found 'gelu'": lambda: (
            ops.states.gated_norm(three, three, plain, "gelu")
        ),
    }.items():
        with pytest.raises(KernelError, match=what):
            call()
