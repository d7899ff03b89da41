"""Modules of transformers that compute what operators of ours compute: found by trying them.

A class's name says little: there are norms that add 1 to their weight, and MLPs that clamp. So a
module's own ``forward`` runs on random numbers, with stand-ins for its weights, and must give what
the operator is defined to give. Only then it is replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdk.kernels.operators.mlp_activations import Activation

#: Of results, against the formula in float32. Formulas that differ do so from the second digit on.
_TOLERANCE = 1e-5
#: Sizes of inputs: a small one shows where epsilon is, a large one a clamp.
_SIZES = (1e-3, 1.0, 50.0)
_WIDTH = 8
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_ACTIVATIONS: dict[Activation, Any] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


class NormFacts(NamedTuple):
    """``(x - mean) / sqrt(mean((x - mean)^2) + eps) * (weight + offset) + bias``; the mean is 0
    unless the norm is ``centred``."""

    eps: float
    offset: float
    centred: bool


def norm_facts(module: nn.Module) -> NormFacts | None:
    """What an RMSNorm or a LayerNorm computes; ``None`` for another module.

    It may have no weight, and a bias.
    """
    parameters = dict(module.named_parameters(recurse=False))
    eps = next((getattr(module, key) for key in _EPSILONS if hasattr(module, key)), None)
    if not isinstance(eps, float) or any(module.children()) or len(list(module.buffers())):
        return None
    if not parameters.keys() <= {"weight", "bias"} or any(
        p.dim() != 1 for p in parameters.values()
    ):
        return None
    width = next((len(parameter) for parameter in parameters.values()), _WIDTH)
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(width, generator=generator) for name in parameters}
    inputs = [size * torch.randn(1, 3, width, generator=generator) for size in _SIZES]
    results = [_result(partial(torch.func.functional_call, module, values, (x,))) for x in inputs]
    for facts in (NormFacts(eps, offset, kind) for kind in (False, True) for offset in (0.0, 1.0)):
        expected = [_normed(x, facts, values) for x in inputs]
        if all(_agrees(found, want) for found, want in zip(results, expected, strict=True)):
            return facts
    return None


def _normed(x: Tensor, facts: NormFacts, values: dict[str, Tensor]) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if facts.centred else x
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + facts.eps)
    if "weight" in values:
        x = x * (values["weight"] + facts.offset)
    return x + values["bias"] if "bias" in values else x


def gated_activation(module: nn.Module) -> Activation | None:
    """The activation of ``down_proj(activation(gate_proj(x)) * up_proj(x))``; ``None`` for a module
    that computes something else."""
    names = ("gate_proj", "up_proj", "down_proj")
    linears = [name for name, child in module.named_children() if type(child) is nn.Linear]
    if sorted(linears) != sorted(names) or [*module.parameters(recurse=False)]:
        return None
    generator = torch.Generator().manual_seed(0)
    stand_ins = [_StandIn(generator) for _ in names]
    probe = copy.copy(module)
    probe._modules = {**module._modules, **dict(zip(names, stand_ins, strict=True))}
    gate, up, down = stand_ins
    inputs = [size * torch.randn(1, 3, _WIDTH, generator=generator) for size in _SIZES]
    results = [_result(partial(probe, x)) for x in inputs]
    for activation, function in _ACTIVATIONS.items():
        expected = [down(function(gate(x)) * up(x)) for x in inputs]
        if all(_agrees(found, want) for found, want in zip(results, expected, strict=True)):
            return activation
    return None


class _StandIn(nn.Module):
    """A linear that keeps the width: another factor and summand for each feature."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.factor, self.summand = torch.randn(2, _WIDTH, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.factor + self.summand
        return y


def _result(run: Callable[[], Any]) -> Any:
    """What a module gives; ``None`` for one that cannot run this way."""
    try:
        with torch.no_grad():
            return run()
    except Exception:  # whatever transformers' code raises for an input that it does not expect
        return None


def _agrees(found: Any, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
