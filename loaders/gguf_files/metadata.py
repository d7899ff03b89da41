"""Typed reads of GGUF metadata: a value of the right type and range, or an error by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sdk.loaders.gguf_files.reader import GgufFile
from sdk.loaders.model_shapes import LIMITS
from sdk.quant.errors import CheckpointError, UnsupportedError

MAX_EXPERTS = LIMITS["num_experts"][1]


class Keys:
    """The metadata of one architecture, ``llama.block_count`` by ``block_count``.

    See :class:`sdk.models.architecture.GgufKeys`.
    """

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.metadata, self.tensors = file.metadata, file.tensors
        self.source = str(file.path)
        self.architecture = architecture
        #: Blocks of multi-token prediction after the layers: some files count those, too, where
        #: they have a value for each layer.
        self.ahead = 0

    def fail(self, key: str, value: Any, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.source}: {self.architecture}.{key} is {str(value)[:80]}, expected {expected}"
        )

    @property
    def expert_count(self) -> int:
        """Experts of a layer; 0 for a model without any."""
        return self.integer("expert_count", (0, MAX_EXPERTS), 0)

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor of this name."""
        return name in self.tensors

    def rows(self, name: str) -> int | None:
        """The rows of a tensor; ``None`` if the file has none of this name."""
        found = self.tensors.get(name)
        return None if found is None or not found.shape else int(found.shape[0])

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, limit: tuple[int, int], default: int | None = None) -> int:
        """An integer; ``default`` where the file has none, ``None`` if it must have one."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise self.fail(key, "missing", "an integer")
            return default
        low, high = limit
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key)
        return default if value is None else self._number(value, key)

    def _number(self, value: Any, key: str) -> float:
        if not isinstance(value, int | float) or not math.isfinite(shortest(value)):
            raise self.fail(key, value, "a finite number")
        return shortest(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool | np.bool_):
            raise self.fail(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.fail(key, value, "a name")
        return value

    def per_layer(
        self,
        key: str,
        limit: str,
        layers: int,
        default: int | None = None,
        *,
        some: bool = False,
    ) -> int:
        """An integer, which a file may also store once per layer; all of them must be equal.
        ``some``: layers may lack it, and have 0; ``default`` if all do."""
        value = self.get(key)
        if some and default is not None and isinstance(value, int) and value == 0:
            return default
        if not isinstance(value, np.ndarray):
            return self.integer(key, LIMITS[limit], default)
        if not self._for_each(value, layers) or value.dtype.kind not in "iu":
            raise self.fail(key, f"an array of {len(value)}", f"{layers} integers")
        value = value[:layers]
        if some:
            value = value[value != 0]
            if default is not None and not len(value):
                return default
        if np.unique(value).size != 1:
            raise UnsupportedError(
                f"{self.source}: {self.architecture}.{key} differs from layer to layer, "
                "which is not supported; use a model with equal layers"
            )
        single = int(value[0])
        low, high = LIMITS[limit]
        if not low <= single <= high:
            raise self.fail(key, single, f"integers from {low} to {high}")
        return single

    def present(self, key: str, layers: int) -> list[bool]:
        """Whether each layer has any of what a file counts for each layer, or once for all."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return [self.integer(key, (0, 1 << 31)) > 0] * layers
        if len(value.shape) != 1 or len(value) < layers or value.dtype.kind not in "iu":
            raise self.fail(key, f"an array of {len(value)}", f"{layers} integers")
        return [int(one) > 0 for one in value[:layers]]

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """A truth value for each layer; ``None``: the file has none."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray | list) or len(value) < layers:
            raise self.fail(key, value, f"{layers} values")
        return [bool(one) for one in value[:layers]]

    def each_layer(self, key: str, limit: str, layers: int, *, some: bool = False) -> list[int]:
        """An integer for each layer, which a file may store once. ``some``: layers may lack it, and
        have 0."""
        value = self.get(key)
        if not isinstance(value, np.ndarray):
            return [self.integer(key, LIMITS[limit])] * layers
        low, high = LIMITS[limit]
        low = 0 if some else low
        wrong = not self._for_each(value, layers) or value.dtype.kind not in "iu"
        if wrong or not ((value[:layers] >= low) & (value[:layers] <= high)).all():
            raise self.fail(
                key, f"an array of {len(value)}", f"{layers} integers from {low} to {high}"
            )
        return [int(one) for one in value[:layers]]

    def _for_each(self, value: np.ndarray, layers: int) -> bool:
        """Whether an array has a value for each layer."""
        return value.shape in ((layers,), (layers + self.ahead,))

    def layer_types(self, layers: int, *, window: int | None, period: int) -> list[str]:
        """The ``layer_types`` of a config; without a ``window`` all layers see all tokens.

        Files store a flag per layer, or that every n-th layer sees all tokens, or nothing: then n
        is ``period``.
        """
        key = "attention.sliding_window_pattern"
        pattern = self.get(key)
        if isinstance(pattern, np.ndarray):
            if not self._for_each(pattern, layers):
                raise self.fail(key, pattern, f"{layers} values")
            local = [bool(value) for value in pattern[:layers]]
        else:
            every = self.integer(key, (1, 512), period)
            local = [(index + 1) % every != 0 for index in range(layers)]
        slides = [value and bool(window) for value in local]
        return ["sliding_attention" if value else "full_attention" for value in slides]


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: undoes the rounding of a config's number.

    A number that float32 cannot hold becomes infinite.
    """
    if abs(value) > float(np.finfo(np.float32).max):
        return math.copysign(math.inf, value)
    return float(str(np.float32(value)))
