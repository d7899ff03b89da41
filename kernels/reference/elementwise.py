"""The small row-wise operators, and the position of each token of a step; fp32."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch

MAPS = ("zeros", "add", "add_bias", "scale", "softcap", "clamp")


class Map:
    """One of ``Ops.zeros``, ``add``, ``add_bias``, ``scale``, ``softcap`` and ``clamp``."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.name = f"reference.{kind}"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, other: Tensor | None = None, factor: float = 0.0) -> None:
        match self._kind:
            case "zeros":
                x.zero_()
            case "scale":
                x *= factor
            case "softcap":
                torch.mul(torch.tanh(x / factor), factor, out=x)
            case "clamp":
                x.clamp_(-factor, factor)
            case _:
                assert other is not None
                x += other


class SelectRows:
    """See :meth:`sdk.kernels.operators.ops.Ops.select_rows`."""

    name = "reference.select_rows"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        torch.index_select(x, 0, rows, out=out)


class PlaceRows:
    """See :meth:`sdk.kernels.operators.ops.Ops.place_rows`."""

    name = "reference.place_rows"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, rows: Tensor, index: Tensor, add: bool) -> None:
        own = index >= 0
        found = rows[index[own].long()]
        x[own] = x[own] + found if add else found


class TakeColumns:
    """See :meth:`sdk.kernels.operators.ops.Ops.take_columns`."""

    name = "reference.take_columns"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, order: Tensor, back: bool, out: Tensor) -> None:
        if back:
            out[:, order.long()] = x
        else:
            torch.index_select(x, 1, order, out=out)


class Places:
    """See :meth:`sdk.kernels.operators.ops.Ops.find_places`."""

    name = "reference.find_places"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, batch: AttentionBatch) -> None:
        counts = batch.query_start.diff().long()
        owner = torch.repeat_interleave(counts)  # the request of each token
        first = batch.context_len.long() - counts - batch.query_start[:-1].long()
        order = torch.arange(batch.num_tokens, device=owner.device)
        torch.add(order, first[owner], out=batch.positions)
        page = batch.page_table[owner, batch.positions // batch.page_size].long()
        batch.slots.copy_(page * batch.page_size + batch.positions % batch.page_size)
