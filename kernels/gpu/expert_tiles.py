"""Multiplying with the weights of many experts in one launch.

The weights are not moved: a kernel gets the tensors of the first expert and, for each expert and
tensor, the offset of the expert's own in elements. Which rows a program has it reads from a list
that was made once for all products of a layer, ``Routes.tiles`` of
:class:`sdk.kernels.operators.routes.Routes`: only experts with rows have tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.operators.routes import TILE_ROWS, Routes, most_tiles, tiles_at

#: Tensors of a packed weight that each expert has; all share the table of values.
PARTS = (
    *("w0", "w1", "w2", "scale", "super_scale", "nested", "offset"),
    *("zeros", "minus", "super_minus"),
)
_COUNT = tl.constexpr(len(PARTS))
#: The most rows of a tile.
MOST_ROWS = TILE_ROWS[-1]

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Experts(Generic[Part]):
    """The weights of a layer's experts, which differ only in their values.

    ``offsets`` int64 ``[E, parts]``: elements from a tensor of the first expert to that of each.
    """

    weights: tuple[Part, ...]
    offsets: Tensor

    @property
    def first(self) -> Part:
        return self.weights[0]

    @property
    def count(self) -> int:
        return len(self.weights)


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows of one product by expert. ``sources [R]``: the row of x for each, if x is not sorted.

    Otherwise x has one row for each of ``starts[e] : starts[e + 1]``.
    """

    offsets: Tensor
    routes: Routes
    sources: Tensor | None

    @property
    def experts(self) -> int:
        return self.offsets.shape[0]

    def tiles(self, block_m: int) -> int:
        """The largest number of tiles, however the rows are routed."""
        return most_tiles(self.routes.tokens.shape[0], self.experts, block_m)


def offsets_of(weights: Sequence[Mapping[str, Tensor]]) -> Tensor | None:
    """``Experts.offsets`` of the weights' tensors by name; None if their shapes differ, or if words
    (``w``, ``w0`` to ``w2``) lie at other distances than multiples of 16 elements: kernels are told
    that they do (:func:`moved_words`). Tensors of their own always do: torch aligns to 512 bytes.
    """
    first = weights[0]
    words = [at for at, name in enumerate(first) if name.startswith("w")]
    table = []
    for weight in weights:
        pairs = [(weight[name], first[name]) for name in first]
        if any(a.dtype != b.dtype or a.shape != b.shape for a, b in pairs):
            return None
        table.append([(a.data_ptr() - b.data_ptr()) // b.itemsize for a, b in pairs])
        if any(table[-1][at] % 16 for at in words):
            return None
    return torch.tensor(table, dtype=torch.int64, device=next(iter(first.values())).device)


def tile_arguments(routed: Routed | None, block_m: int) -> dict[str, Any]:
    """The kernel arguments that :func:`expert_tile` reads, by name, and ``sources``."""
    if routed is None:
        return dict.fromkeys(("offsets", "starts", "tiles", "sources"), None) | {"tiles_at": 0}
    routes = routed.routes
    assert routes.tiles is not None, "routes of a group operator without tiles"
    found: dict[str, Any] = {"offsets": routed.offsets, "starts": routes.starts}
    at = tiles_at(routes.tokens.shape[0], routed.experts, block_m)
    return found | {"tiles": routes.tiles, "sources": routed.sources, "tiles_at": at}


@triton.jit
def expert_tile(starts, tiles, tiles_at, index):
    """Whose rows tile ``index`` has, the first of them, and where the expert's end.

    ``tiles_at``: where the tiles of this size begin. One that is not needed has its first row
    beyond the end. Its loads do not wait for each other, but that of the end.
    """
    entry = tiles + 2 * (tiles_at + 1 + index)
    expert = tl.load(entry)
    first = tl.load(entry + 1)
    there = index < tl.load(tiles + 2 * tiles_at)
    expert = tl.where(there, expert, 0)
    first = tl.where(there, first, 0x7FFFFFFF)
    return expert, first, tl.load(starts + expert + 1)


@triton.jit
def moved(part, offsets, expert, INDEX: tl.constexpr):
    """An expert's own part: where the first's lies, and the offset."""
    return part + tl.load(offsets + expert * _COUNT + INDEX)


@triton.jit
def moved_words(part, offsets, expert, INDEX: tl.constexpr):
    """:func:`moved` for words, at multiples of 16 elements (:func:`offsets_of`): 16-byte loads."""
    return part + tl.multiple_of(tl.load(offsets + expert * _COUNT + INDEX), 16)
