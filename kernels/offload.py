"""Weights that do not stay in the memory of their device: what an engine is told of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from sdk.kernels.host_layers import HostLayers

if TYPE_CHECKING:
    from sdk.kernels.registry import Backend


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Of a CPU: packed weights stay in memory while they fit into ``stays`` bytes, in the order in
    which they are packed; the others lie in ``file``.

    ``file``: open for reading and writing, without a name, with ``size`` bytes of room; whoever
    takes this closes it.
    """

    stays: int
    size: int
    file: Any


@dataclass(frozen=True, slots=True)
class OnHost:
    """Of a GPU: the layers from ``first`` on have their weights in the machine's memory."""

    first: int


Offload = OnDisk | OnHost
Packed = TypeVar("Packed")


def places_of(
    offload: Offload | None, device: torch.device
) -> tuple[OnDisk | None, HostLayers | None]:
    """What a backend is told, and what ``Ops`` does itself for any backend."""
    if isinstance(offload, OnHost):
        return None, HostLayers(offload.first, device)
    return offload, None


class OffloadOps:
    """The part of :class:`sdk.kernels.ops.Ops` that is about weights elsewhere."""

    device: torch.device
    _backends: list[Backend]
    _host: HostLayers | None

    @property
    def offloaded(self) -> int:
        """Bytes of packed weights that are not in the memory of the device."""
        away = 0 if self._host is None else self._host.nbytes
        return away + sum(backend.offloaded for backend in self._backends)

    def load_layer(self, index: int) -> AbstractContextManager[None]:
        """Weights that are bound inside are those of layer ``index``; layers come in order."""
        return nullcontext() if self._host is None else self._host.load(index)

    def run_layer(self, index: int) -> AbstractContextManager[None]:
        """Operators inside are those of layer ``index``, whose weights are there."""
        return nullcontext() if self._host is None else self._host.run(index)

    def kept(self, packed: Packed) -> Packed:
        """A weight just packed, now where those of its layer lie."""
        if self._host is not None:
            self._host.keep(packed)
        return packed

    def fetched(self, packed: Any) -> AbstractContextManager[None]:
        """Between steps: a packed weight can be read inside."""
        return nullcontext() if self._host is None else self._host.fetched(packed)
