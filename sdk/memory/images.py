"""What reading images takes: the tower, its workspace and the image cache."""

from __future__ import annotations

import math
from dataclasses import replace

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.engine.scheduling.tower_limits import (
    BLOCK_ROWS,
    JOINT_PATCHES,
    TowerLimits,
)
from sdk.memory import resolve
from sdk.memory.image_memory import ImageMemory
from sdk.memory.weights import held_bytes
from sdk.models.configs.config import ModelConfig
from sdk.quant.checkpoint import Checkpoint

#: The image cache takes this much, or one image of the largest size if that is more.
_CACHE_BYTES = 64 * 2**20
#: More images of the largest size are not kept.
_MOST_IMAGES = 64
#: Without a ``max_model_len`` the largest image has this many tokens at most.
_MOST_TOKENS = 4096
#: The workspace of the tower is at most this, and a tile at most as large as fits.
_WORKSPACE_BYTES = 2**30


def why_no_images(config: EngineConfig, model: ModelConfig) -> str | None:
    """Why an engine reads no images; ``None``: it does."""
    vision = model.vision
    if vision is None:
        return f"{model.model_type} has no encoder of images that is supported"
    if not config.most_images:
        return 'it was loaded with limit_mm_per_prompt={"image": 0}'
    if resolve.device_of(config) != "cpu":
        return "a GPU reads text only in this release: use device='cpu'"
    if not config.enable_chunked_prefill and not vision.dual:
        return "it needs enable_chunked_prefill=True"
    if config.prefill_replicas:
        return "it needs prefill_replicas=0 in this release"
    if vision.dual and config.pipeline_parallel_size > 1:
        return "it needs pipeline_parallel_size=1, because the last stage has no vectors of images"
    if vision.features > 1 and config.pipeline_parallel_size > 1:
        return "it needs pipeline_parallel_size=1, because images enter several layers"
    return None


def image_options(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The options with steps in which the tokens of an image that see each other both ways have
    room beside those of other requests, unless the caller says how large steps are."""
    vision = model.vision
    if vision is None or config.max_num_batched_tokens is not None:
        return config
    if not vision.span or why_no_images(config, model) is not None:
        return config
    span = min(vision.span, config.max_model_len or model.max_position)
    tokens = max(config.step_tokens, span + config.max_num_seqs)
    return replace(config, max_num_batched_tokens=tokens)


def image_memory(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> ImageMemory | None:
    """``None``: the engine reads no images.

    :raises RequestError: images were asked for, and it cannot read any.
    """
    vision, why = model.vision, why_no_images(config, model)
    if why is not None and config.limit_mm_per_prompt is not None and config.most_images:
        raise RequestError(
            f"limit_mm_per_prompt: expected {{'image': 0}}, found "
            f"{{'image': {config.most_images}}}: {why}"
        )
    if vision is None or why is not None:
        return None
    from sdk.models.vision.memory import tower_bytes, workspace_bytes  # with images
    from sdk.models.vision.portions import GROUP

    tokens = min(vision.max_tokens, config.max_model_len or min(model.max_position, _MOST_TOKENS))
    tokens = -(-tokens // BLOCK_ROWS) * BLOCK_ROWS
    patches = min(vision.max_patches, math.ceil(vision.max_patches * tokens / vision.max_tokens))
    together = min(max(patches, JOINT_PATCHES), GROUP)  # several tiles
    if vision.positions and vision.axes is None and not vision.max_patches % vision.positions:
        patches = vision.positions  # of a tile, which has one size
    one = workspace_bytes(vision, GROUP) / GROUP
    patches = min(patches, max(int(_WORKSPACE_BYTES / one), GROUP))
    row = 4 * vision.features * vision.hidden_size
    rows = max(tokens, min(_CACHE_BYTES // row // BLOCK_ROWS * BLOCK_ROWS, _MOST_IMAGES * tokens))
    ranks, entries = config.tensor_parallel_size, checkpoint.entries()
    return ImageMemory(
        rows,
        patches,
        ranks * tower_bytes(replace(one, held=held_bytes(one, "cpu")) for one in entries),
        ranks * workspace_bytes(vision, max(patches, together)),
        ranks * rows * row,
    )


def tower_limits(
    config: EngineConfig, model: ModelConfig, memory: ImageMemory | None
) -> TowerLimits | None:
    """What the scheduler knows of an engine's tower."""
    vision = model.vision
    if memory is None or vision is None:
        return None
    seen = [window for window in model.sliding_windows if window is not None]
    return TowerLimits(
        rows=memory.rows,
        vision=vision,
        max_patches=memory.max_patches,
        window=min(seen, default=0),
        span=config.step_tokens - config.max_num_seqs,
        per_prompt=config.most_images,
    )
