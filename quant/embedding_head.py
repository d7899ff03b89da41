"""What a model's files say about its embeddings: pooling, and the layers after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.dataclass import dataclass

Floats = NDArray[np.float32]


def _gelu(x: Floats) -> Floats:
    halves = [0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()]
    found: Floats = (x * np.array(halves)).astype(np.float32)
    return found


def _sigmoid(x: Floats) -> Floats:
    found: Floats = (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)
    return found


#: The activations of dense layers, by the names of torch's classes.
ACTIVATIONS: Mapping[str, Callable[[Floats], Any]] = MappingProxyType(
    {
        "Identity": lambda x: x,
        "Tanh": np.tanh,
        "ReLU": lambda x: np.maximum(x, 0),
        "Sigmoid": _sigmoid,
        "SiLU": lambda x: x * _sigmoid(x),
        "GELU": _gelu,
    }
)


@dataclass(frozen=True, slots=True)
class NormalizeStep:
    """Scales a vector to length 1."""

    def __call__(self, x: Floats) -> Floats:
        length = float(np.sqrt(np.square(x.astype(np.float64)).sum()))
        return (x / max(length, 1e-12)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class DenseStep:
    """``activation(weight @ x + bias)``; ``weight`` float32 ``[out, in]``."""

    weight: Floats
    bias: Floats | None
    activation: str

    @property
    def width(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: Floats) -> Floats:
        y = self.weight @ x
        if self.bias is not None:
            y = y + self.bias
        return np.asarray(ACTIVATIONS[self.activation](y), np.float32)


@dataclass(frozen=True, slots=True)
class EmbeddingHead:
    """``mode``: the pooling. ``steps`` follow it in order. ``prompt`` is put before every text."""

    mode: str
    steps: tuple[DenseStep | NormalizeStep, ...] = ()
    prompt: str = ""

    def __call__(self, pooled: Any) -> list[float]:
        """The embedding of pooled hidden states, a vector of ``hidden_size`` numbers."""
        x = np.asarray(pooled, np.float32)
        for step in self.steps:
            x = step(x)
        found: list[float] = x.tolist()
        return found


#: Scales a vector to length 1.
UNIT = EmbeddingHead("last", (NormalizeStep(),))
