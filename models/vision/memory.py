"""The memory of a tower, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable

from sdk.models.vision.config import VisionConfig
from sdk.models.vision.sequences import PAGE_SIZE
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
    """What a run of this many patches (at most; tiles are run in groups) needs beside weights."""
    c = config.tower
    heads = c.num_heads * c.head_dim
    pages = 2 * heads * (patches + PAGE_SIZE - 1)
    pixels = 3 * config.patch**2 * patches
    block = max(4 * heads, 3 * c.intermediate_size)
    return 4 * (pages + max(pixels * 2, patches * (block + 3 * c.hidden_size)))
