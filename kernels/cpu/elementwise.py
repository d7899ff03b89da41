"""RMSNorm and gated activations: ``native/elementwise.hpp``."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from sdk.kernels.cpu.library import Engine, GatedArgs, NormArgs, check
from sdk.kernels.errors import KernelError
from sdk.kernels.registry import Problem

_KINDS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class RmsNorm:
    """See :meth:`sdk.kernels.ops.Ops.rms_norm`."""

    name = "cpu.rms_norm"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        _norm(self._engine, x, None, weight, eps, out)


class AddRmsNorm:
    """See :meth:`sdk.kernels.ops.Ops.add_rms_norm`."""

    name = "cpu.add_rms_norm"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        if residual.shape != x.shape or not residual.is_contiguous():
            raise KernelError(
                f"add_rms_norm: expected a contiguous residual {list(x.shape)}, "
                f"found {list(residual.shape)} with strides {residual.stride()}"
            )
        _norm(self._engine, x, residual, weight, eps, out)


def _norm(
    engine: Engine, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    width = x.shape[-1]
    if weight.shape != (width,):
        raise KernelError(f"rms_norm: expected weight [{width}], found {list(weight.shape)}")
    weight = floats(weight, "rms_norm weight")
    floats(x, "rms_norm x")
    args = NormArgs(
        x.data_ptr(),
        None if residual is None else floats(residual, "rms_norm residual").data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        width,
        eps,
    )
    check(engine.rms_norm(engine.handle, byref(args), x.numel() // width), "rms_norm")


class GatedActivation:
    """See :meth:`sdk.kernels.ops.Ops.gated_activation`."""

    name = "cpu.gated_activation"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def reject(self, problem: Problem) -> str | None:
        if problem.format not in _KINDS:
            return f"activation {problem.format!r}: expected one of {', '.join(_KINDS)}"
        return None

    def run(self, gate_up: Tensor, kind: str, out: Tensor) -> None:
        floats(gate_up, "gated_activation")
        args = GatedArgs(gate_up.data_ptr(), out.data_ptr(), out.shape[1], _KINDS[kind])
        check(self._engine.gated(self._engine.handle, byref(args), out.shape[0]), "gated")


def floats(x: Tensor, what: str) -> Tensor:
    """``x``, contiguous. :raises KernelError: unless it is float32 on the CPU."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise KernelError(f"{what}: expected float32 on cpu, found {x.dtype} on {x.device}")
    return x.contiguous()
