"""Norms, activations and the small row-wise operators: ``native/elementwise.hpp``."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import (
    ActivationArgs,
    GateArgs,
    MapArgs,
    NormArgs,
    OpKind,
    PlaceRowsArgs,
    SelectArgs,
    TakeArgs,
)
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.mlp_activations import ALWAYS_GATED
from sdk.kernels.operators.norm import Norm

_KINDS = {
    "silu": 0,
    "gelu_tanh": 1,
    "gelu": 2,
    "clamped_swiglu": 3,
    "relu": 4,
    "relu2": 5,
    "xielu": 6,
}
#: With the numbers of native/abi.hpp.
GATE_KINDS = {"sigmoid": 0, "softplus": 1, "silu": 2, "linear": 3, "tanh": 4}
#: In-place operators on rows, with the numbers of native/abi.hpp.
MAPS = {"zeros": 0, "add": 1, "add_bias": 2, "scale": 3, "softcap": 4, "clamp": 5}


class Normalize:
    """See :meth:`sdk.kernels.operators.ops.Ops.norm`."""

    name = "cpu.norm"
    rounds = False

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, norm: Norm, out: Tensor) -> None:
        _norm(self._runtime, x, None, norm, out)


class AddNormalize:
    """See :meth:`sdk.kernels.operators.ops.Ops.add_norm`."""

    name = "cpu.add_norm"
    rounds = False

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor) -> None:
        if residual.shape != x.shape or not residual.is_contiguous():
            raise KernelError(
                f"add_norm: expected a contiguous residual {list(x.shape)}, "
                f"found {list(residual.shape)} with strides {residual.stride()}"
            )
        _norm(self._runtime, x, residual, norm, out)


def _norm(
    runtime: NativeRuntime, x: Tensor, residual: Tensor | None, norm: Norm, out: Tensor
) -> None:
    width = x.shape[-1]
    weight, bias = norm.weight, norm.bias
    heads = weight is not None and weight.dim() == 2
    shape = x.shape[1:] if heads else (width,)
    for name, given, wanted in (("weight", weight, shape), ("bias", bias, (width,))):
        if given is None:
            continue
        if given.shape != wanted or not given.is_contiguous():
            raise KernelError(
                f"norm: expected a contiguous {name} {list(wanted)}, found {list(given.shape)}"
            )
        floats(given, f"norm {name}")
    if x.dtype != torch.float32 or x.dim() > 3 or x.stride(-1) != 1:
        raise KernelError(
            f"norm: expected float32 rows of at most 3 dimensions, found {x.dtype} "
            f"{list(x.shape)} with strides {x.stride()}"
        )
    inner = x.shape[1] if x.dim() == 3 else 1
    args = NormArgs(
        x.data_ptr(),
        None if residual is None else floats(residual, "norm residual").data_ptr(),
        None if weight is None else weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        width,
        inner,
        x.stride(0) if x.dim() > 1 else 0,
        x.stride(1) if x.dim() == 3 else 0,
        width if heads else 0,
        norm.eps,
        norm.centred,
    )
    runtime.run(OpKind.NORM, args, x.numel() // width, "norm")


class Activate:
    """See :meth:`sdk.kernels.operators.ops.Ops.gated_activation` and ``activation``."""

    def __init__(self, runtime: NativeRuntime, *, gated: bool) -> None:
        self._runtime = runtime
        self._gated = gated
        self._kinds = [kind for kind in _KINDS if gated or kind not in ALWAYS_GATED]
        self.name = f"cpu.{'gated_' if gated else ''}activation"

    def reject(self, problem: Problem) -> str | None:
        if problem.format not in self._kinds:
            return f"activation {problem.format!r}: expected one of {', '.join(self._kinds)}"
        return None

    def run(
        self,
        x: Tensor,
        kind: str,
        out: Tensor,
        numbers: Sequence[float] = (),
        used: Tensor | None = None,
    ) -> None:
        if floats(x, self.name) is not x:
            raise KernelError(f"{self.name}: expected contiguous rows, found {x.stride()}")
        args = ActivationArgs(
            x.data_ptr(),
            out.data_ptr(),
            out.shape[1],
            None if used is None else used.data_ptr(),
            _KINDS[kind],
            self._gated,
            (c_float * 4)(*numbers),
        )
        self._runtime.run(OpKind.ACTIVATION, args, out.shape[0], self.name)


class Gate:
    """See :meth:`sdk.kernels.operators.ops.Ops.gate`."""

    name = "cpu.gate"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, gate: Tensor, kind: str) -> None:
        rows, gates = gate.shape
        for name, given in (("x", x), ("gate", gate)):
            if given.dtype != torch.float32 or given.stride(1) != 1:
                raise KernelError(
                    f"gate {name}: expected float32 rows, found {given.dtype} with strides "
                    f"{given.stride()}"
                )
        if not x.is_contiguous() or x.shape[0] != rows or x.shape[1] % gates:
            raise KernelError(
                f"gate: expected {rows} contiguous rows of runs of {gates} gates, found "
                f"{list(x.shape)} with strides {x.stride()}"
            )
        pointers = x.data_ptr(), gate.data_ptr()
        args = GateArgs(*pointers, x.shape[1] // gates, gates, gate.stride(0), GATE_KINDS[kind])
        self._runtime.run(OpKind.GATE, args, rows, "gate")


class Map:
    """One of ``Ops.zeros``, ``add``, ``add_bias``, ``scale``, ``softcap`` and ``clamp``."""

    def __init__(self, runtime: NativeRuntime, kind: str) -> None:
        self._runtime = runtime
        self._kind = MAPS[kind]
        self._what = kind
        self.name = f"cpu.{kind}"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, other: Tensor | None = None, factor: float = 0.0) -> None:
        width = x.shape[-1]
        rows = x.numel() // width
        if floats(x, self._what) is not x:
            raise KernelError(f"{self._what}: expected contiguous rows, found {x.stride()}")
        if other is not None and other.numel() != (
            width if self._what == "add_bias" else x.numel()
        ):
            raise KernelError(
                f"{self._what}: {list(other.shape)} does not fit rows {list(x.shape)}"
            )
        # Kept in a variable: it may be a copy, which must live until the call returns.
        other = None if other is None else floats(other, self._what)
        data = None if other is None else other.data_ptr()
        args = MapArgs(x.data_ptr(), data, width, factor, self._kind)
        self._runtime.run(OpKind.MAP, args, rows, self._what)


class SelectRows:
    """See :meth:`sdk.kernels.operators.ops.Ops.select_rows`."""

    name = "cpu.select_rows"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        if rows.dtype != torch.int64 or not rows.is_contiguous():
            raise KernelError(f"select_rows: expected int64 rows, found {rows.dtype}")
        x = floats(x, "select_rows")
        args = SelectArgs(x.data_ptr(), rows.data_ptr(), out.data_ptr(), x.shape[1], x.shape[0])
        self._runtime.run(OpKind.SELECT, args, rows.shape[0], "select_rows")


class PlaceRows:
    """See :meth:`sdk.kernels.operators.ops.Ops.place_rows`."""

    name = "cpu.place_rows"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, rows: Tensor, index: Tensor, add: bool) -> None:
        if not (x.is_contiguous() and index.is_contiguous() and rows.stride(1) == 1):
            raise KernelError(
                "place_rows: expected contiguous x, index and numbers of a row, found strides "
                f"{x.stride()}, {index.stride()} and {rows.stride()}"
            )
        pointers = [one.data_ptr() for one in (x, rows, index)]
        args = PlaceRowsArgs(*pointers, x.shape[1], rows.stride(0), rows.shape[0], add)
        self._runtime.run(OpKind.PLACE_ROWS, args, x.shape[0], "place_rows")


class TakeColumns:
    """See :meth:`sdk.kernels.operators.ops.Ops.take_columns`."""

    name = "cpu.take_columns"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, order: Tensor, back: bool, out: Tensor) -> None:
        if order.dtype != torch.int32 or order.shape != x.shape[1:] or not order.is_contiguous():
            raise KernelError(
                f"take_columns: expected an int32 order [{x.shape[1]}], found {order.dtype} "
                f"{list(order.shape)}"
            )
        x = floats(x, "take_columns")
        args = TakeArgs(x.data_ptr(), order.data_ptr(), out.data_ptr(), x.shape[1], back)
        self._runtime.run(OpKind.TAKE, args, x.shape[0], "take_columns")


def floats(x: Tensor, what: str) -> Tensor:
    """``x``, contiguous. :raises KernelError: unless it is float32 on the CPU."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise KernelError(f"{what}: expected float32 on cpu, found {x.dtype} on {x.device}")
    return x.contiguous()
