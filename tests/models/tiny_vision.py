"""Tiny random vision models of transformers, and what they make of images."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from sdk.models.vision.config import VisionConfig
from sdk.models.vision.image import ImageInput

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: Heads of 24 features, patches of 7 pixels.
SIGLIP: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 56,
    "patch_size": 7,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT,
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 16,
        "image_token_index": 90,
    },
}


def vision_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose features are of the size of 1."""
    config = transformers.CONFIG_MAPPING[name](**{**MODELS[name], **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() == 1 else parameter[0].numel() ** -0.5
            parameter.normal_(0.3 if parameter.dim() == 1 else 0.0, spread)
    return model


def image(config: VisionConfig, sizes: list[tuple[int, int]], seed: int) -> ImageInput:
    """An image with tiles of these heights and widths, of random pixels."""
    noise = np.random.default_rng(seed)
    side = config.patch * config.merge
    tiles = tuple(noise.integers(0, 256, (*size, 3), np.uint8) for size in sizes)
    grids = tuple((height // side, width // side) for height, width in sizes)
    count = sum(rows * columns for rows, columns in grids)
    return ImageInput(tiles, grids, count, bytes([seed]) * 32)


def normalized(tile: NDArray[np.uint8], config: VisionConfig) -> Tensor:
    """As transformers' processors do it: float32 ``[3, height, width]``."""
    scaled = torch.from_numpy((tile * config.scale).astype(np.float32))
    return ((scaled - torch.tensor(config.mean)) / torch.tensor(config.std)).permute(2, 0, 1)


def expected_rows(model: Any, config: VisionConfig, images: list[ImageInput]) -> list[Tensor]:
    """What transformers makes of each image."""
    found = []
    for own in images:
        pixels = torch.stack([normalized(tile, config) for tile in own.tiles])
        with torch.no_grad():
            rows = model.get_image_features(pixel_values=pixels).pooler_output
        found.append(rows.reshape(-1, rows.shape[-1]))
    return found
