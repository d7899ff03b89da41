"""Sums and gathers over ranks as native operators."""

from __future__ import annotations

from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import ExchangeArgs, OpKind
from sdk.kernels.cpu.rank_group import SharedGroup
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import CaptureError
from sdk.kernels.groups import Group
from sdk.kernels.reference import exchange


class AllReduce:
    """See :meth:`sdk.kernels.ops.Ops.all_reduce`."""

    name = "cpu.all_reduce"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, group: Group) -> None:
        if not isinstance(group, SharedGroup) or x.stride(1) != 1:
            expect_no_recording(self._runtime, group)
            exchange.AllReduce().run(x, group)
            return
        rows, width = x.shape
        args = ExchangeArgs(group.handle, x.data_ptr(), None, width, x.stride(0), width, width, 0)
        self._runtime.run(OpKind.EXCHANGE, args, rows, self.name)


class AllGather:
    """See :meth:`sdk.kernels.ops.Ops.all_gather`."""

    name = "cpu.all_gather"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, group: Group, width: int, out: Tensor) -> None:
        if not isinstance(group, SharedGroup) or x.stride(1) != 1:
            expect_no_recording(self._runtime, group)
            exchange.AllGather().run(x, group, width, out)
            return
        rows, own = x.shape
        args = ExchangeArgs(
            group.handle, x.data_ptr(), out.data_ptr(), own, x.stride(0), width, out.shape[1], 0
        )
        self._runtime.run(OpKind.EXCHANGE, args, rows, self.name)


def expect_no_recording(runtime: NativeRuntime, group: Group) -> None:
    """:raises CaptureError: a step is being recorded, and this group has no native operators."""
    if runtime.recording is not None:
        raise CaptureError(f"sums over a {type(group).__name__} cannot be recorded")
