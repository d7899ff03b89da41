"""Sums and gathers over ranks by the group itself, transfers between two by their link."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.groups import CollectiveGroup, Link
from sdk.kernels.lazy_torch import Tensor, torch


class AllReduce:
    """See :meth:`sdk.kernels.operators.ops.Ops.all_reduce`."""

    name = "reference.all_reduce"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, group: CollectiveGroup) -> None:
        group.all_reduce(x)


class AllGather:
    """See :meth:`sdk.kernels.operators.ops.Ops.all_gather`."""

    name = "reference.all_gather"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, group: CollectiveGroup, width: int, out: Tensor) -> None:
        gather_columns(group, width, x, out)


def gather_columns(group: CollectiveGroup, width: int, x: Tensor, out: Tensor) -> None:
    """Write the x of all ranks side by side into ``out``; the last one may be narrower."""
    missing = width - x.shape[1]
    padded = torch.nn.functional.pad(x, (0, missing)) if missing else x.contiguous()
    for rank, part in enumerate(group.all_gather(padded)):
        # one part at a time: torch shares larger copies with threads that spin while they wait
        columns = out[:, rank * width : (rank + 1) * width]
        columns.copy_(part[:, : columns.shape[1]])


class Send:
    """See :meth:`sdk.kernels.operators.ops.Ops.send`."""

    name = "reference.send"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, link: Link) -> None:
        link.send(x)


class Receive:
    """See :meth:`sdk.kernels.operators.ops.Ops.receive`."""

    name = "reference.receive"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, out: Tensor, link: Link) -> None:
        link.receive(out)
