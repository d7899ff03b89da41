"""The tensors of one packed layer, and the protocol of format modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.weights.layouts import Layout
from sdk.loaders.folders.safetensors_reader import StoredTensor
from sdk.quant.errors import CheckpointError
from sdk.quant.permuted import Permuted


class StoredLayer:
    """The tensors of one layer of a folder, by their endings (``".qweight"``).

    ``name`` is the models' name for the layer, ``shape`` the ``(N, K)`` that the config implies
    (None if unknown), ``metadata`` the strings in the headers of the files.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int] | None,
        tensors: Mapping[str, StoredTensor],
        metadata: Mapping[str, str],
        folder: Path,
        take: Callable[[StoredTensor], Tensor],
        warn: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self.shape = shape
        self.metadata = metadata
        self._tensors = tensors
        self._folder = folder
        self._take = take
        self._warn = warn

    def has(self, ending: str) -> bool:
        return self.name + ending in self._tensors

    def stored(self, ending: str) -> StoredTensor:
        """The tensor's position, shape and type (``"I32"``), from the header alone.

        Raises:
            CheckpointError: the layer has no such tensor.
        """
        found = self._tensors.get(self.name + ending)
        if found is None:
            raise self.fail(ending, "missing")
        return found

    def read(
        self, ending: str, types: tuple[str, ...], shape: tuple[int, ...] | None = None
    ) -> Tensor:
        """The tensor, newly allocated; it counts as used from now on.

        Args:
            ending: the part after the layer's name.
            types: safetensors' names of the allowed types.
            shape: the required shape, if known.

        Raises:
            CheckpointError: it is missing, or has another type or shape.
        """
        stored = self.stored(ending)
        if stored.dtype not in types:
            raise self.fail(ending, f"{stored.dtype}, expected {' or '.join(types)}")
        if shape is not None and stored.shape != shape:
            raise self.fail(ending, f"shape {list(stored.shape)}, expected {list(shape)}")
        return self._take(stored)

    def skip(self, ending: str) -> None:
        """Count a tensor that is not needed as used, if it exists."""
        if self.has(ending):
            self._take(self.stored(ending))

    def check_shape(self, ending: str, shape: tuple[int, int]) -> None:
        """
        Raises:
            CheckpointError: the tensor at ``ending`` holds another ``(N, K)`` than the config
                implies.
        """
        if self.shape is not None and shape != self.shape:
            raise self.fail(
                ending, f"shape {list(shape)}, the config asks for {list(self.shape)} ({self.name})"
            )

    def fail(self, ending: str, what: str) -> CheckpointError:
        """An error with the file, the tensor and ``what`` (expected and found)."""
        found = self._tensors.get(self.name + ending)
        path, name = self._folder, self.name + ending
        if found is not None:
            path, name = found.file.path, found.name
        return CheckpointError(f"{path}: tensor {name!r}: {what}")

    def warn(self, what: str) -> None:
        """Log ``what`` once per checkpoint, with the name of the first layer concerned."""
        self._warn(what, self.name)


class Format(Protocol):
    """A format module of this folder, named like ``quantization_config.quant_method``."""

    #: A layer with a tensor of one of these endings is packed, whatever the config says.
    ENDINGS: tuple[str, ...]
    #: Endings of the other tensors of such a layer.
    COMPANIONS: tuple[str, ...]

    def settings(self, config: Mapping[str, Any], source: str) -> Any:
        """``quantization_config`` (empty if a folder has none), parsed and checked.

        Raises:
            CheckpointError: invalid; names ``source``, the key, what was expected and found.
            UnsupportedError: it needs something that is not supported.
        """

    def outline(self, layer: StoredLayer, settings: Any) -> tuple[tuple[int, ...], str]:
        """Shape ``(N, K)`` and type (``"gptq-w4g128"``) of a layer, from the headers alone."""

    def decode(self, layer: StoredLayer, settings: Any) -> Layout | Permuted:
        """The layer in a kernel layout. Use numpy for whole matrices (quant/join.py says why).

        Raises:
            CheckpointError: see :meth:`StoredLayer.fail`.
        """
