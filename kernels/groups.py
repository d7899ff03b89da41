"""Groups of ranks, which compute one model together."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Moves tensors between ranks; every rank makes the same calls in the same order.

    Both methods raise :class:`sdk.kernels.errors.CollectiveError` if a rank is lost.
    """

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over all ranks, in place; the same bits on every rank."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in rank order; all of one shape."""
