"""Modules of transformers that compute what operators of ours compute: found by trying them.

A class's name says little: there are RMSNorms that add 1 to their weight, and MLPs that clamp. So a
module's own ``forward`` runs on random numbers, with stand-ins for its weights, and must give what
the operator is defined to give. Only then it is replaced.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sdk.kernels.mlp_activations import Activation

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


class RmsNormFacts(NamedTuple):
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)``."""

    eps: float
    offset: float


def rms_norm_facts(module: nn.Module) -> RmsNormFacts | None:
    """What an RMSNorm computes; ``None`` for another module."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    eps = next((getattr(module, key) for key in _EPSILONS if hasattr(module, key)), None)
    if len(parameters) != 1 or weight is None or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if [*module.children()] or [*module.buffers()]:
        return None
    width = weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(width, generator=generator)
    inputs = [size * torch.randn(1, 3, width, generator=generator) for size in _SIZES]
    for offset in (0.0, 1.0):
        expected = [
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (values + offset)
            for x in inputs
        ]
        if all(
            _agrees(lambda x=x: torch.func.functional_call(module, {"weight": values}, (x,)), want)
            for x, want in zip(inputs, expected, strict=True)
        ):
            return RmsNormFacts(eps, offset)
    return None


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
    for activation, function in _ACTIVATIONS.items():
        expected = [down(function(gate(x)) * up(x)) for x in inputs]
        if all(
            _agrees(lambda x=x: probe(x), want) for x, want in zip(inputs, expected, strict=True)
        ):
            return activation
    return None


class _StandIn(nn.Module):
    """A linear that keeps the width: another factor and summand for each feature."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.factor, self.summand = torch.randn(2, _WIDTH, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.summand


def _agrees(run: Any, expected: Tensor) -> bool:
    """Whether a module gives ``expected``; one that cannot run this way does not."""
    try:
        with torch.no_grad():
            found = run()
    except Exception:  # whatever transformers' code raises for an input that it does not expect
        return False
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
