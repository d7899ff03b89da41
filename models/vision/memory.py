"""The memory of a tower, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable

from sdk.models.vision.config import VisionConfig
from sdk.models.vision.sequences import PAGE_SIZE, value_room
from sdk.quant.checkpoint import VISION_ROOT, TensorEntry

#: What is float32 in memory, whatever the file has.
_FLOATS = ("patches.weight", "positions.weight")


def tower_bytes(entries: Iterable[TensorEntry]) -> int:
    """The weights of a tower in memory; 0 if the checkpoint has none."""
    found = 0
    for entry in entries:
        if entry.name.startswith(VISION_ROOT):
            whole = len(entry.shape) == 1 or entry.name.removeprefix(VISION_ROOT) in _FLOATS
            stored = entry.nbytes if entry.held is None else entry.held
            found += 4 * entry.num_elements if whole else stored
    return found


def workspace_bytes(config: VisionConfig, patches: int) -> int:
    """What tiles of this many patches need together beside weights, with their results.

    Tiles run in groups of :data:`sdk.models.vision.portions.GROUP` patches, or of one tile that has
    more; what has run has its results alone.
    """
    c, width = config.tower, config.tower.hidden_size
    heads, pixels = c.num_heads * c.head_dim, 3 * config.patch**2
    tokens = -(-patches // config.merge**2)
    if config.queries:
        tokens = -(-patches * config.max_tokens // config.max_patches)
    # Windows at the edges are smaller, and begin a page of their own.
    rows = patches + (patches // 2 if config.window else 0) + PAGE_SIZE
    pages = c.num_heads * (c.head_dim + value_room(c.head_dim)) * rows
    embedded = patches * (2 * pixels + pixels // 4 + 3 * width)
    attention = patches * (4 * heads + 4 * width)
    mlp = patches * (3 * c.intermediate_size + 5 * width)
    middle = max(config.projected_width * config.joined, config.projector_width, config.hidden_size)
    projected = patches * 6 * width + tokens * (middle + 2 * config.hidden_size)
    if config.queries:  # keys and values of a tile, and what they are made of
        tile = min(patches, config.max_patches) + PAGE_SIZE
        projected = 6 * tile * config.hidden_size + 2 * patches * width
    results = 2 * tokens * config.features * config.hidden_size
    results += patches * width * len(config.side_by_side)  # until the last of these layers has run
    return 4 * int(pages + max(embedded, attention, mlp, projected) + results)
