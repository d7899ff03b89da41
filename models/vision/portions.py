"""How the work of a tower is cut into parts that run between steps, from the sizes of tiles alone.

Scheduler and tower count the same parts, so they are defined here, without numpy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sdk.models.vision.config import VisionConfig

#: Up to this many patches run together, or one tile alone: more need memory and no less time.
GROUP = 4096
#: Operations of a part of a layer, about: 0.25 s of two cores. A layer of SigLIP over 4,096 patches
#: has six times as many.
PART_OPERATIONS = 1 << 35
#: Queries, keys and values are this part of the products of a layer, so a part has as many rows
#: more.
_KEYS = 3


class Parts(NamedTuple):
    """How many rows of a group of tiles run at once: through the projection to queries, keys and
    values, through the rest of a layer, and through the projector."""

    keys: int
    rest: int
    projected: int


def parts_of(lengths: Sequence[int], config: VisionConfig) -> Parts | None:
    """Of tiles with so many rows each. ``None``: a layer is one part, and the last one has the
    projector."""
    hidden, joined = config.tower.hidden_size, config.joined
    row = 24 * hidden**2 + 4 * hidden * max(lengths)
    rest = max(PART_OPERATIONS // row, 1)
    if sum(lengths) <= rest:
        return None
    return Parts(_KEYS * rest, rest, max(rest // joined, 1) * joined)


def inner_size(parts: Parts, config: VisionConfig) -> int:
    """How many rows become fewer at once where a layer is followed by that: twice the operations
    of a layer for each (:mod:`sdk.models.vision.inner`)."""
    square = config.inner**2
    return max(parts.rest // (2 * square), 1) * square


def queried_rows(config: VisionConfig) -> int:
    """Of how many patches keys and values are made at once where tokens are queries: the matrices
    to the width of the text, to keys and to values, and what the queries find in them."""
    hidden, width = config.hidden_size, config.tower.hidden_size
    row = 2 * hidden * (width + 2 * hidden + 2 * config.queries)
    return max(PART_OPERATIONS // row, 1)


def after_inner(lengths: Sequence[int], config: VisionConfig) -> list[int]:
    """The rows of tiles behind the layer ``config.inner_after``."""
    return [count // config.inner**2 for count in lengths]


def units(lengths: Sequence[int], config: VisionConfig) -> int:
    """The parts of all layers and projectors for a group of tiles."""
    layers, parts = config.tower.num_layers, parts_of(lengths, config)
    if config.inner == 1:
        return layers * _layer_units(lengths, parts) + _projector_units(lengths, parts, config)
    before, fewer = config.inner_after + 1, after_inner(lengths, config)
    found = before * _layer_units(lengths, parts)
    if parts is not None:
        found += -(-sum(lengths) // inner_size(parts, config))
    parts = parts_of(fewer, config)
    found += (layers - before) * _layer_units(fewer, parts)
    return found + _projector_units(fewer, parts, config)


def _layer_units(lengths: Sequence[int], parts: Parts | None) -> int:
    if parts is None:
        return 1
    return -(-sum(lengths) // parts.keys) - (-sum(lengths) // parts.rest)


def _projector_units(lengths: Sequence[int], parts: Parts | None, config: VisionConfig) -> int:
    if config.queries:
        size = queried_rows(config)
        return sum(-(-count // size) for count in lengths)
    if parts is None:
        return 0
    rows = sum(lengths) - len(lengths) * config.class_token
    if config.dual and config.class_token:
        rows = len(lengths)
    return config.features * -(-rows // parts.projected)


def groups(patches: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of the tiles, which have that many patches each and run together."""
    group, count = list[int](), 0
    for number, own in enumerate(patches):
        if group and count + own > GROUP:
            yield group
            group, count = [], 0
        group.append(number)
        count += own
    if group:
        yield group
