"""Which part of which matrices of a checkpoint a projection multiplies with, for adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Part(NamedTuple):
    """What a projection has of one matrix ``[out, in]`` of a checkpoint, under the path of that.

    ``rows``: this rank's ranges ``(start, count)`` of the matrix's output features. Together they
    are the projection's output features from ``first`` on. ``columns``: its range of the input
    features. A matrix that a model joins with others may be named alone (``q_proj``) or as a part
    of the joined one (``qkv_proj``), so parts may overlap.
    """

    path: str
    shape: tuple[int, int]
    first: int
    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]


def whole(path: str, shape: tuple[int, int]) -> Part:
    """All of a matrix."""
    return Part(path, shape, 0, ((0, shape[0]),), (0, shape[1]))


def joined_parts(
    path: str, fused: str, parts: Sequence[tuple[str, int, int, int]], inputs: int
) -> list[Part]:
    """The parts of :meth:`sdk.models.layers.Source.columns`: each under its own name, and all as
    one, ``fused``."""
    found: list[Part] = []
    joined: list[tuple[int, int]] = []
    first = offset = 0
    for name, size, start, count in parts:
        found.append(Part(f"{path}.{name}", (size, inputs), first, ((start, count),), (0, inputs)))
        joined.append((offset + start, count))
        first += count
        offset += size
    all_parts = Part(fused, (offset, inputs), 0, tuple(joined), (0, inputs))
    return found if found[0].path == fused else [*found, all_parts]
