"""Weights that do not stay in the memory of their device, and where the layers' weights are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sdk.kernels.host_layers import HostLayers


@dataclass(frozen=True, slots=True)
class OnDisk:
    """CPU only: packed weights stay in memory until ``stays`` bytes are used, in the order in which
    they are packed. The others are in ``file``.

    ``file``: an unnamed file, open for reading and writing, with room for ``size`` bytes. The
    backend closes it.
    """

    stays: int
    size: int
    file: Any


@dataclass(frozen=True, slots=True)
class OnHost:
    """GPU only: the weights of layer ``first`` and all later layers are in host memory."""

    first: int


Offload = OnDisk | OnHost


class LayerWeights(Protocol):
    """Where the weights of a model's layers are."""

    @property
    def nbytes(self) -> int:
        """Bytes of packed weights that are not in the memory of the device."""

    def load(self, index: int) -> AbstractContextManager[None]:
        """Weights that are bound inside belong to layer ``index``. Layers are loaded in order."""

    def run(self, index: int) -> AbstractContextManager[None]:
        """Operators called inside belong to layer ``index``, whose weights are on the device."""

    def keep(self, packed: Any) -> None:
        """Take a weight that was just packed: its tensors now are where its layer's weights are."""

    def fetched(self, packed: Any) -> AbstractContextManager[None]:
        """Between steps: inside, the tensors of a packed weight hold its values."""


class OnDevice:
    """All layers are in the device's memory all the time."""

    nbytes = 0

    @contextmanager
    def load(self, index: int) -> Iterator[None]:
        yield

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        yield

    def keep(self, packed: Any) -> None:
        pass

    @contextmanager
    def fetched(self, packed: Any) -> Iterator[None]:
        yield


def layer_weights(offload: Offload | None, device: torch.device) -> LayerWeights:
    """``OnDisk`` is the backend's own affair: to the operators its weights are in memory."""
    return HostLayers(offload.first, device) if isinstance(offload, OnHost) else OnDevice()
