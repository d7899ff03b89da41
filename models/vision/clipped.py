"""Matrices whose inputs and results are clamped to ranges that a checkpoint states (Gemma 4).

Beside the weight of a matrix there may be four numbers: ``input_min``, ``input_max``,
``output_min`` and ``output_max``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.mlp_activations import Activation
from sdk.kernels.operators.rounding import Rows
from sdk.models.projections import Projection
from sdk.models.source import Source
from sdk.quant.errors import CheckpointError

_NAMES = ("input_min", "input_max", "output_min", "output_max")


class Range(NamedTuple):
    """The least and the largest number."""

    low: float = -math.inf
    high: float = math.inf

    def clamped(self, x: Tensor) -> Tensor:
        """x itself, if all numbers are in the range."""
        return x if self == Range() else x.clamp(self.low, self.high)


class Piece(NamedTuple):
    """A product and the ranges of its input and of runs of its results: ``(features, range)``."""

    projection: Projection
    given: Range
    results: Sequence[tuple[int, Range]]

    def __call__(self, x: Tensor) -> Tensor:
        y = self.projection(self.given.clamped(x))
        first = 0
        for count, own in self.results:
            if own != Range():
                y[:, first : first + count] = own.clamped(y[:, first : first + count])
            first += count
        return y


class ClippedProjection(Projection):
    """Products of one input side by side, clamped before and after."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        first = pieces[0].projection
        super().__init__(first.matrix, first.mesh, first.ops)
        self.pieces = pieces

    @property
    def rounding(self) -> None:
        """It needs floats, which it clamps."""

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor) and out is None
        found = [piece(x) for piece in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def gated(self, x: Rows, activation: Activation) -> Tensor:
        """See :class:`sdk.models.projections.Projection`."""
        return self.ops.gated_activation(self(x), activation)


class ClippedSource(Source):
    """A :class:`sdk.models.source.Source` whose projections have the ranges of the checkpoint, on
    one rank."""

    def columns(
        self,
        path: str,
        fused: str,
        parts: Sequence[tuple[str, int, int, int]],
        *,
        bias: bool = False,
        accurate: bool = False,
        order: Tensor | None = None,
        inputs: int | None = None,
    ) -> Projection:
        """See :class:`sdk.models.source.Source`. Products whose inputs have the same range are one
        product."""
        names = [name for name, *_ in parts]
        ranges = [self._ranges(f"{path}.{name}") for name in names]
        if len({given for given, _ in ranges}) == 1:
            joined = super().columns(
                path, fused, parts, bias=bias, accurate=accurate, order=order, inputs=inputs
            )
            results = [(part[3], own) for part, (_, own) in zip(parts, ranges, strict=True)]
            return _clipped([Piece(joined, ranges[0][0], results)])
        pieces, first = list[Piece](), 0
        for part, (given, own) in zip(parts, ranges, strict=True):
            count = part[3]
            mine = None if order is None else order[first : first + count] - first
            one = super().columns(
                path, part[0], [part], bias=bias, accurate=accurate, order=mine, inputs=inputs
            )
            pieces.append(Piece(one, given, [(count, own)]))
            first += count
        return _clipped(pieces)

    def row(
        self,
        path: str,
        in_features: int,
        start: int,
        count: int,
        *,
        bias: bool = False,
        reduce: bool = True,
    ) -> Projection:
        """See :class:`sdk.models.source.Source`."""
        plain = super().row(path, in_features, start, count, bias=bias, reduce=reduce)
        given, own = self._ranges(path)
        return _clipped([Piece(plain, given, [(self.config.hidden_size, own)])])

    def _ranges(self, path: str) -> tuple[Range, Range]:
        """Of the input and of the results of a matrix."""
        found = [-math.inf, math.inf, -math.inf, math.inf]
        for index, name in enumerate(_NAMES):
            if self.has(f"{path}.{name}"):
                value = self.checkpoint.tensor(self._name(f"{path}.{name}"))
                if value.numel() != 1:
                    shape = list(value.shape)
                    raise CheckpointError(f"{path}.{name}: expected one number, found {shape}")
                found[index] = float(value.reshape(-1)[0])
        ranges = Range(found[0], found[1]), Range(found[2], found[3])
        if not all(one.low <= one.high for one in ranges):
            raise CheckpointError(f"{path}: expected ranges of inputs and results, found {found}")
        return ranges


def _clipped(pieces: Sequence[Piece]) -> Projection:
    """The plain projection, if nothing is clamped."""
    first = pieces[0]
    whole = all(own == Range() for _, own in first.results)
    if len(pieces) == 1 and first.given == Range() and whole:
        return first.projection
    return ClippedProjection(pieces)
