"""How ranks, which compute one model together, exchange tensors."""

from __future__ import annotations

from typing import Protocol

from sdk.kernels.lazy_torch import Tensor


class CollectiveGroup(Protocol):
    """Moves tensors between ranks; every rank makes the same calls in the same order.

    Both methods raise :class:`sdk.kernels.errors.CollectiveError` if a rank is lost.
    """

    def all_reduce(self, x: Tensor) -> None:
        """Sum ``x`` over all ranks, in place; the same bits on every rank."""

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """The ``x`` of every rank, in rank order; all of one shape."""


class Link(Protocol):
    """One end of a one-way connection between two ranks; what one sends, the other receives.

    Both methods raise :class:`sdk.kernels.errors.CollectiveError` if the other rank is lost.
    """

    def send(self, x: Tensor) -> None:
        """Send a contiguous float32 tensor. Waits only if many tensors were not received yet."""

    def receive(self, out: Tensor) -> None:
        """Wait for the next tensor, which has the shape of ``out``, and write it there."""

    @property
    def waited_seconds(self) -> float:
        """How long this end has waited for the other one so far."""

    def reserve(self, nbytes: int) -> None:
        """Make room for tensors of this size. Both ends call it."""
