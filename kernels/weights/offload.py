"""Offloaded weights: where they are, and how layers get them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.host_layers import HostLayers


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Packed weights of a CPU that are in a file. The first ``stays`` bytes that are packed stay in
    memory, the others are in ``file``.

    ``file``: an unnamed file, open for reading and writing, with room for ``size`` bytes. The
    backend closes it.
    """

    stays: int
    size: int
    file: Any


@dataclass(frozen=True, slots=True)
class OnHost:
    """A GPU's weights in host memory: those of layer ``first`` and of all later layers."""

    first: int


Offload = OnDisk | OnHost


class LayerWeights(Protocol):
    """Where the weights of a model's layers are."""

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights that are not in the device's memory."""

    def load(self, index: int) -> AbstractContextManager[None]:
        """A context: weights bound inside it belong to layer ``index``. Layers load in order."""

    def run(self, index: int) -> AbstractContextManager[None]:
        """A context: layer ``index`` runs inside it, with its weights on the device."""

    def keep(self, packed: Any) -> Any:
        """Move the tensors of a weight that was just packed to its layer's weights; the weight as
        kernels get it."""

    def fetched(self, packed: Any) -> AbstractContextManager[None]:
        """A context between steps in which the tensors of a packed weight hold its values."""


class OnDevice:
    """Layers whose weights stay in the device's memory."""

    nbytes = 0

    def load(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def keep(self, packed: Any) -> Any:
        return packed

    def fetched(self, packed: Any) -> AbstractContextManager[None]:
        return nullcontext()


def layer_weights(offload: Offload | None, device: torch.device) -> LayerWeights:
    """The layers' weights. ``OnDisk`` is handled by the backend: operators see memory."""
    return HostLayers(offload.first, device) if isinstance(offload, OnHost) else OnDevice()
