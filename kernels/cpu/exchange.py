"""Sums and gathers over ranks, and transfers between two of them, as native operators."""

from __future__ import annotations

from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import ExchangeArgs, OpKind, TransferArgs
from sdk.kernels.cpu.rank_group import SharedGroup, SharedLink
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import CaptureError
from sdk.kernels.groups import Group, Link
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


class _Transfer:
    """Sends rows, or receives them into a tensor: the end of the link determines which."""

    name: str

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def _transfer(self, x: Tensor, link: Link) -> bool:
        """False: the link is not native."""
        if not isinstance(link, SharedLink):
            expect_no_recording(self._runtime, link)
            return False
        rows, width = x.shape
        args = TransferArgs(link.handle, x.data_ptr(), width, 0)
        self._runtime.run(OpKind.TRANSFER, args, rows, self.name)
        return True


class Send(_Transfer):
    """See :meth:`sdk.kernels.ops.Ops.send`."""

    name = "cpu.send"

    def run(self, x: Tensor, link: Link) -> None:
        if not self._transfer(x, link):
            link.send(x)


class Receive(_Transfer):
    """See :meth:`sdk.kernels.ops.Ops.receive`."""

    name = "cpu.receive"

    def run(self, out: Tensor, link: Link) -> None:
        if not self._transfer(out, link):
            link.receive(out)


def expect_no_recording(runtime: NativeRuntime, over: Group | Link) -> None:
    """:raises CaptureError: a step is being recorded, and ``over`` has no native operators."""
    if runtime.recording is not None:
        raise CaptureError(f"exchanges over a {type(over).__name__} cannot be recorded")
