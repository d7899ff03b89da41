"""What a model's files say about its embeddings: pooling, and the layers after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import field
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
class LayerNormStep:
    """Mean 0 and variance 1, then ``weight`` and ``bias``, float32 ``[n]``."""

    weight: Floats
    bias: Floats
    eps: float = 1e-5  # torch's default, which sentence-transformers keeps

    @property
    def width(self) -> int:
        return int(self.weight.shape[0])

    def __call__(self, x: Floats) -> Floats:
        y = x.astype(np.float64)
        y = (y - y.mean()) / np.sqrt(y.var() + self.eps)
        return np.asarray(y * self.weight + self.bias, np.float32)


Step = DenseStep | NormalizeStep | LayerNormStep


@dataclass(frozen=True, slots=True)
class Filling:
    """Texts are filled up to ``length`` tokens with ``token``, at the end or on the ``left``, and
    all tokens see those (SigLIP)."""

    length: int
    token: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Contrast:
    """How a dual encoder compares a text with an image: by ``factor * cosine + bias``.

    ``each``: the sigmoid is the probability that the two belong together (SigLIP). Else the softmax
    over several texts says to which one an image belongs (CLIP).
    """

    factor: float
    bias: float
    each: bool

    def logit(self, cosine: float) -> float:
        return self.factor * cosine + self.bias


@dataclass(frozen=True, slots=True)
class EmbeddingHead:
    """``modes``: the poolings, whose vectors are joined; ``token`` alone: a vector for each token.

    ``steps`` follow in order. ``prompts``: texts by name that can be put before a text;
    ``default_prompt``: the name of the one that is put there unless another is asked for.
    """

    modes: tuple[str, ...]
    steps: tuple[Step, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    #: Whether the tokens of a prompt are pooled too.
    include_prompt: bool = True
    #: The longest text that the model was trained for, in tokens.
    max_tokens: int | None = None
    #: Whether texts are read in lower case.
    lower_case: bool = False
    #: How vectors are compared: cosine, dot, euclidean or manhattan.
    similarity: str = "cosine"
    #: Of late interaction: tokens of documents whose vectors do not count.
    skipped_words: tuple[str, ...] = ()
    #: Of late interaction: queries are filled up with mask tokens that no token attends to.
    pads_queries: bool = False
    #: Of a dual encoder, in which the vector of an image is scaled to length 1 and no more.
    contrast: Contrast | None = None
    filling: Filling | None = None
    #: What follows the first token that ends a text does not count.
    until_end: bool = False

    @property
    def mode(self) -> str:
        """What :meth:`__call__` needs: all tokens if one pooled vector is not enough."""
        return self.modes[0] if len(self.modes) == 1 and self.include_prompt else "token"

    @property
    def per_token(self) -> bool:
        """Whether a text has a vector for each token (late interaction)."""
        return self.modes == ("token",)

    @property
    def gives_units(self) -> bool:
        """Whether vectors have length 1."""
        return bool(self.steps) and isinstance(self.steps[-1], NormalizeStep)

    def width(self, hidden_size: int) -> int:
        """The numbers of a vector."""
        widths = [step.width for step in self.steps if not isinstance(step, NormalizeStep)]
        return widths[-1] if widths else hidden_size * len(self.modes)

    def __call__(self, pooled: Any, skip: int = 0) -> list[float]:
        """The embedding of what :attr:`mode` gives: ``hidden_size`` numbers, or rows of them, of
        which the first ``skip`` are of a prompt that does not count."""
        x = np.asarray(pooled, np.float32)
        if self.mode == "token" and not self.per_token:
            x = np.concatenate([_pooled(x, mode, skip) for mode in self.modes])
        for step in self.steps:
            x = step(x)
        found: list[float] = x.tolist()
        return found

    def of_image(self, pooled: Any, skip: int = 0) -> list[float]:
        """The embedding of a prompt with an image: of a dual encoder ``pooled`` is the image's."""
        if self.contrast is None:
            return self(pooled, skip)
        return unit(np.asarray(pooled, np.float32).reshape(-1))

    def rows(self, states: Any) -> Floats:
        """The vectors of all tokens, float32 ``[tokens, width]``."""
        x = np.asarray(states, np.float32)
        return np.stack([np.asarray(self(row), np.float32) for row in x])


def _pooled(rows: Floats, mode: str, skip: int) -> Floats:
    """Rows ``skip`` and up as one vector. A weighted mean counts from the first row of all."""
    used = rows[min(skip, len(rows) - 1) :].astype(np.float64)
    if mode == "max":
        found = used.max(0)
    elif mode in ("cls", "last"):
        found = used[0 if mode == "cls" else -1]
    elif mode == "weightedmean":
        weights = np.arange(len(rows) - len(used) + 1, len(rows) + 1, dtype=np.float64)
        found = (used * weights[:, None]).sum(0) / weights.sum()
    else:
        found = used.sum(0) / (len(used) if mode == "mean" else math.sqrt(len(used)))
    return np.asarray(found, np.float32)


def unit(vector: Any) -> list[float]:
    """The vector scaled to length 1."""
    found: list[float] = NormalizeStep()(np.asarray(vector, np.float32)).tolist()
    return found
