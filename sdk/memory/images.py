"""What reading images takes: the tower, its workspace and the image cache."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.engine.scheduling.image_limits import BLOCK_ROWS, GROUP_PATCHES, ImageLimits
from sdk.memory import resolve
from sdk.memory.weights import held_bytes
from sdk.models.config import ModelConfig
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.memory import tower_bytes, workspace_bytes
from sdk.quant.checkpoint import Checkpoint

#: The image cache takes this much, or one image of the largest size if that is more.
_CACHE_BYTES = 64 * 2**20
#: Without a ``max_model_len`` the largest image has so many tokens at most.
_MOST_TOKENS = 4096
#: The workspace of the tower is at most this, and a tile at most as large as fits.
_WORKSPACE_BYTES = 2**30


class ImageMemory(NamedTuple):
    """``rows``: of the image cache; ``max_patches``: of a tile. The rest is in bytes, of all ranks
    together."""

    rows: int
    max_patches: int
    weights: int
    workspace: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.workspace + self.cache


def reads_images(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether an engine loads the model's encoder of images."""
    return model.vision is not None and config.most_images != 0


def image_memory(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> ImageMemory | None:
    """``None``: the engine reads no images.

    :raises RequestError: an option does not work with images.
    """
    vision = model.vision
    if vision is None or not reads_images(config, model):
        return None
    _check(config, model, vision)
    tokens = min(vision.max_tokens, config.max_model_len or min(model.max_position, _MOST_TOKENS))
    tokens = -(-tokens // BLOCK_ROWS) * BLOCK_ROWS
    patches = min(vision.max_patches, math.ceil(vision.max_patches * tokens / vision.max_tokens))
    if vision.positions and vision.axes is None and not vision.max_patches % vision.positions:
        patches = vision.positions  # of a tile, which has one size
    one = workspace_bytes(vision, GROUP_PATCHES) / GROUP_PATCHES
    patches = min(patches, max(int(_WORKSPACE_BYTES / one), GROUP_PATCHES))
    row = 4 * vision.features * vision.hidden_size
    rows = max(tokens, _CACHE_BYTES // row // BLOCK_ROWS * BLOCK_ROWS)
    ranks, entries = config.tensor_parallel_size, checkpoint.entries()
    return ImageMemory(
        rows,
        patches,
        ranks * tower_bytes(replace(one, held=held_bytes(one, "cpu")) for one in entries),
        ranks * workspace_bytes(vision, max(patches, min(GROUP_PATCHES, vision.max_patches))),
        ranks * rows * row,
    )


def _check(config: EngineConfig, model: ModelConfig, vision: VisionConfig) -> None:
    without = 'or set limit_mm_per_prompt={"image": 0}'
    if not config.enable_chunked_prefill:
        raise RequestError(
            f"enable_chunked_prefill: expected True for a model that reads images, {without}"
        )
    if resolve.device_of(config) != "cpu":
        raise RequestError(
            "device: expected 'cpu' for a model that reads images in this release, found "
            f"{config.device!r}; {without}"
        )
    stages = config.pipeline_parallel_size
    if vision.features > 1 and stages > 1:
        raise RequestError(
            f"pipeline_parallel_size: expected 1 for {model.model_type}, whose images enter "
            f"several layers, found {stages}; {without}"
        )


def image_limits(
    config: EngineConfig, model: ModelConfig, memory: ImageMemory | None
) -> ImageLimits | None:
    """What the scheduler knows of an engine's tower."""
    vision = model.vision
    if memory is None or vision is None:
        return None
    seen = [window for window in model.sliding_windows if window is not None]
    return ImageLimits(
        rows=memory.rows,
        layers=vision.tower.num_layers,
        hidden=vision.tower.hidden_size,
        patch=vision.patch,
        max_patches=memory.max_patches,
        token_id=vision.token_id,
        both_ways=vision.both_ways is not None,
        window=min(seen, default=0),
        span=config.step_tokens - config.max_num_seqs,
        per_prompt=config.most_images,
        axes=vision.axes is not None,
    )
