"""What a projection has: a weight and a bias, parts of a checkpoint's matrices, and adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.quant.weight import Weight


class Adapters(Protocol):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of one projection or embedding."""

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        """Add the output of adapter ``slots[t]`` for ``x[t]`` to ``y[t]`` (``y [T, out]``).

        ``slots``: int32, -1 for no adapter. x of an embedding: token ids.
        """


class Matrix(NamedTuple):
    """The weight and the bias of a projection.

    ``order``, int32 ``[out]``: column ``order[j]`` of the product is feature j, because the rows of
    this weight's layout cannot be moved. ``None``: the columns are in the model's order.
    """

    weight: Weight
    bias: Tensor | None
    order: Tensor | None = None

    def ordered(self, order: Tensor) -> Matrix:
        """With feature ``order[j]`` (int64 ``[out]``) in place j; only before the weight is bound.
        Rows are moved now, if the layout allows it, and else columns of each product."""
        weight = self.weight.reordered(order)
        if weight is None:
            return self._replace(order=order.to(torch.int32))
        return Matrix(weight, None if self.bias is None else self.bias[order])


class Tensors(NamedTuple):
    """What a model has pulled, by path."""

    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Tensor]


class Part(NamedTuple):
    """What a projection has of one matrix ``[out, in]`` of a checkpoint, under the path of that.

    ``rows``: this rank's ranges ``(start, count)`` of the matrix's output features. Together they
    are the projection's output features from ``first`` on. ``columns``: its range of the input
    features. A matrix that a model joins with others may be named alone (``q_proj``) or as a part
    of the joined one (``qkv_proj``), so parts may overlap. ``order``, int64: feature i of the part
    is that of row ``order[i]`` of these ranges; ``None``: of row i.
    """

    path: str
    shape: tuple[int, int]
    first: int
    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]
    order: Tensor | None = None


def whole(path: str, shape: tuple[int, int]) -> Part:
    """All of a matrix."""
    return Part(path, shape, 0, ((0, shape[0]),), (0, shape[1]))


def joined_parts(
    path: str,
    fused: str,
    parts: Sequence[tuple[str, int, int, int]],
    inputs: int,
    order: Tensor | None = None,
) -> list[Part]:
    """The parts of :meth:`Source.columns`: each under its own name, and all as one, ``fused``."""
    found: list[Part] = []
    joined: list[tuple[int, int]] = []
    offsets, total = offsets_of(parts)
    first = 0
    for name, ranges in groupby(parts, key=lambda part: part[0]):
        each = [(size, (start, count)) for _, size, start, count in ranges]
        rows = tuple(own for _, own in each)
        features = sum(count for _, count in rows)
        own = None if order is None else order[first : first + features] - first
        found.append(Part(f"{path}.{name}", (each[0][0], inputs), first, rows, (0, inputs), own))
        joined += [(offsets[name] + start, count) for start, count in rows]
        first += features
    all_parts = Part(fused, (total, inputs), 0, tuple(joined), (0, inputs), order)
    return [all_parts] if found[0].path == fused else [*found, all_parts]


def offsets_of(parts: Sequence[tuple[str, int, int, int]]) -> tuple[dict[str, int], int]:
    """Where the rows of each matrix begin if all are joined, and the rows of all together."""
    offsets: dict[str, int] = {}
    total = 0
    for name, size, _, _ in parts:
        if name not in offsets:
            offsets[name] = total
            total += size
    return offsets, total
