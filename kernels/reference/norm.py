"""RMSNorm, with and without the residual addition, and the gated activations; fp32."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch


class RmsNorm:
    """See :meth:`sdk.kernels.ops.Ops.rms_norm`."""

    name = "reference.rms_norm"
    rounds = False

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        x = x.float()
        mean = (x * x).mean(dim=-1, keepdim=True)
        torch.mul(x * torch.rsqrt(mean + eps), weight, out=out)


class AddRmsNorm:
    """See :meth:`sdk.kernels.ops.Ops.add_rms_norm`."""

    name = "reference.add_rms_norm"
    rounds = False

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        residual += x
        RmsNorm().run(residual, weight, eps, out)


class Gate:
    """See :meth:`sdk.kernels.ops.Ops.gate`."""

    name = "reference.gate"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, gate: Tensor, kind: str) -> None:
        gate = gate.float()
        factor = torch.sigmoid(gate) if kind == "sigmoid" else torch.nn.functional.softplus(gate)
        runs = x.view(*gate.shape, -1)
        runs.copy_(runs.float() * factor.unsqueeze(2))


class GatedActivation:
    """See :meth:`sdk.kernels.ops.Ops.gated_activation`."""

    name = "reference.gated_activation"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, gate_up: Tensor, kind: str, out: Tensor, used: Tensor | None = None) -> None:
        gate, up = gate_up.float().chunk(2, dim=1)
        if kind == "silu":
            activated = torch.nn.functional.silu(gate)
        elif kind == "gelu_tanh":
            activated = torch.nn.functional.gelu(gate, approximate="tanh")
        elif kind == "gelu":
            activated = torch.nn.functional.gelu(gate)
        elif kind == "clamped_swiglu":  # Source: gpt-oss' reference code, swiglu()
            gate = gate.clamp(max=7.0)
            activated = gate * torch.sigmoid(1.702 * gate)
            up = up.clamp(-7.0, 7.0) + 1.0
        else:
            names = "silu, gelu_tanh, gelu or clamped_swiglu"
            raise KernelError(f"gated_activation: expected {names}, found {kind!r}")
        torch.mul(activated, up, out=out)
