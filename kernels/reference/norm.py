"""Norms, with and without the residual addition, and activations; fp32."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.mlp_activations import ALWAYS_GATED
from sdk.kernels.operators.norm import Norm


class Normalize:
    """See :meth:`sdk.kernels.operators.ops.Ops.norm`."""

    name = "reference.norm"
    rounds = False

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, norm: Norm, out: Tensor) -> None:
        x = x.float()
        if norm.centred:
            x = x - x.mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + norm.eps)
        if norm.weight is not None:
            x = x * norm.weight
        out.copy_(x if norm.bias is None else x + norm.bias)


class AddNormalize:
    """See :meth:`sdk.kernels.operators.ops.Ops.add_norm`."""

    name = "reference.add_norm"
    rounds = False

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor) -> None:
        residual += x
        Normalize().run(residual, norm, out)


class Gate:
    """See :meth:`sdk.kernels.operators.ops.Ops.gate`."""

    name = "reference.gate"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, gate: Tensor, kind: str) -> None:
        factor = gate.float()
        if kind == "sigmoid":
            factor = torch.sigmoid(factor)
        elif kind == "softplus":
            factor = torch.nn.functional.softplus(factor)
        elif kind == "silu":
            factor = torch.nn.functional.silu(factor)
        runs = x.view(*gate.shape, -1)
        runs.copy_(runs.float() * factor.unsqueeze(2))


class GatedActivation:
    """See :meth:`sdk.kernels.operators.ops.Ops.gated_activation`."""

    name = "reference.gated_activation"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        gate_up: Tensor,
        kind: str,
        out: Tensor,
        numbers: Sequence[float] = (),
        used: Tensor | None = None,
    ) -> None:
        gate, up = gate_up.float().chunk(2, dim=1)
        if kind == "clamped_swiglu":  # Source: gpt-oss' reference code, swiglu()
            gate = gate.clamp(max=7.0)
            activated = gate * torch.sigmoid(1.702 * gate)
            up = up.clamp(-7.0, 7.0) + 1.0
        else:
            activated = activate(gate, kind, numbers)
        out.copy_(activated * up)


class Activation:
    """See :meth:`sdk.kernels.operators.ops.Ops.activation`."""

    name = "reference.activation"

    def reject(self, problem: Problem) -> str | None:
        if problem.format in ALWAYS_GATED:
            return f"activation {problem.format!r}: computes with a gate only"
        return None

    def run(
        self,
        x: Tensor,
        kind: str,
        out: Tensor,
        numbers: Sequence[float] = (),
        used: Tensor | None = None,
    ) -> None:
        out.copy_(activate(x.float(), kind, numbers))


def activate(x: Tensor, kind: str, numbers: Sequence[float]) -> Tensor:
    """One of :data:`sdk.kernels.operators.mlp_activations.Activation` that takes one input."""
    match kind:
        case "silu":
            return torch.nn.functional.silu(x)
        case "gelu_tanh":
            return torch.nn.functional.gelu(x.double(), approximate="tanh").float()
        case "gelu":  # of strided rows, and at the end of a tensor, torch has other bits in float32
            return torch.nn.functional.gelu(x.double()).float()
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
        case "xielu":
            # Huang and Schlag 2024, arXiv 2411.13010, with the eps of transformers' code
            alpha_p, alpha_n, beta, eps = numbers
            low = torch.expm1(x.clamp(max=eps)) - x
            return torch.where(x > 0, alpha_p * x * x, alpha_n * low) + beta * x
    names = "silu, gelu_tanh, gelu, clamped_swiglu, relu, relu2 or xielu"
    raise KernelError(f"activation: expected {names}, found {kind!r}")
