"""Sums and gathers over ranks, and transfers between two of them, as operators.

Those over shared memory are native. Other groups and links are called from Python, between the
native operators of a recorded step.
"""

from __future__ import annotations

from functools import partial

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import ExchangeArgs, OpKind, TransferArgs
from sdk.kernels.cpu.rank_group import SharedGroup, SharedLink
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.groups import CollectiveGroup, Link
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.reference.exchange import gather_columns


class AllReduce:
    """See :meth:`sdk.kernels.operators.ops.Ops.all_reduce`."""

    name = "cpu.all_reduce"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, group: CollectiveGroup) -> None:
        if not isinstance(group, SharedGroup) or x.stride(1) != 1:
            self._runtime.call(group.all_reduce, (x,), self.name)
            return
        rows, width = x.shape
        args = ExchangeArgs(group.handle, x.data_ptr(), None, width, x.stride(0), width, width, 0)
        self._runtime.run(OpKind.EXCHANGE, args, rows, self.name)


class AllGather:
    """See :meth:`sdk.kernels.operators.ops.Ops.all_gather`."""

    name = "cpu.all_gather"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, group: CollectiveGroup, width: int, out: Tensor) -> None:
        if not isinstance(group, SharedGroup) or x.stride(1) != 1:
            self._runtime.call(partial(gather_columns, group, width), (x, out), self.name)
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

    def _transfer(self, x: Tensor, link: SharedLink) -> None:
        rows, width = x.shape
        args = TransferArgs(link.handle, x.data_ptr(), width, 0)
        self._runtime.run(OpKind.TRANSFER, args, rows, self.name)


class Send(_Transfer):
    """See :meth:`sdk.kernels.operators.ops.Ops.send`."""

    name = "cpu.send"

    def run(self, x: Tensor, link: Link) -> None:
        if isinstance(link, SharedLink):
            self._transfer(x, link)
        else:
            self._runtime.call(link.send, (x,), self.name)


class Receive(_Transfer):
    """See :meth:`sdk.kernels.operators.ops.Ops.receive`."""

    name = "cpu.receive"

    def run(self, out: Tensor, link: Link) -> None:
        if isinstance(link, SharedLink):
            self._transfer(out, link)
        else:
            self._runtime.call(link.receive, (out,), self.name)
