"""Tiny random vision models of transformers, and what they make of images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from sdk.models.vision.anyres import best_size
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

#: Layers of a Gemma 3 with a window that is a little longer than an image.
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
#: Heads of 24 features, patches of 7 pixels.
SIGLIP: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 56,
    "patch_size": 7,
}
#: Heads of 24 features, patches of 4 pixels, a table of 5 by 5 positions.
QWEN: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "depth": 3,
    "num_heads": 3,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
}
ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 3000.0}
HYBRID: dict[str, Any] = {
    **TEXT,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
#: Layers with a window and without one, whose heads differ.
GEMMA4_TEXT: dict[str, Any] = {
    **TEXT,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 20.0,
}
#: Heads of 24 features, patches of 4 pixels, of which 4 become a token.
GEMMA4: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 600,
}
PIXTRAL: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 64,
    "patch_size": 4,
    "head_dim": 24,
}
#: Families whose images have any shape.
FREE = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5")
MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT,
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 16,
        "image_token_index": 90,
    },
    "gemma4": {
        "text_config": {
            **GEMMA4_TEXT,
            "use_bidirectional_attention": "vision",
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        "vision_config": {**GEMMA4, "standardize": True},
        "image_token_id": 90,
    },
    # the small sizes
    "gemma4-e": {
        "text_config": {
            **GEMMA4_TEXT,
            "num_hidden_layers": 5,
            "layer_types": [*GEMMA4_TEXT["layer_types"], *GEMMA4_TEXT["layer_types"][1:]],
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "pad_token_id": 3,
        },
        "vision_config": {**GEMMA4, "use_clipped_linears": True},
        "image_token_id": 90,
    },
    "idefics3": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SIGLIP, "image_size": 42},
        "scale_factor": 3,
        "image_token_id": 90,
    },
    "smolvlm": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": SIGLIP,
        "scale_factor": 2,
        "image_token_id": 90,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {
            **QWEN,
            "num_position_embeddings": None,
            "window_size": 25,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 90,
    },
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**SIGLIP, "image_size": [56, 56], "patch_size": [7, 7]},
        "image_token_id": 90,
    },
    "lfm2_vl": {
        "text_config": {**TEXT, "model_type": "lfm2"},
        "vision_config": {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 25},
        "projector_hidden_size": 56,
        "image_token_id": 90,
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
        "image_token_index": 90,
    },
    "llava_next": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
        "image_token_index": 90,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56]],
    },
    # several layers of the tower, and one without a class token
    "llava-layers": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
        "image_token_index": 90,
        "vision_feature_layer": [-2, -3],
    },
    "llava-siglip": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
        "image_token_index": 90,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    # Granite Vision
    "llava_next-siglip": {
        "text_config": {**TEXT, "model_type": "granite"},
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
        "image_token_index": 90,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56]],
        "vision_feature_layer": [-3, -2, -1],
        "vision_feature_select_strategy": "full",
    },
    # Pixtral 12B
    "llava-pixtral": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**PIXTRAL, "model_type": "pixtral"},
        "image_token_index": 90,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "llava_onevision": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model"},
        "image_token_index": 90,
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112], [168, 56], [168, 168]],
        "vision_aspect_ratio": "anyres_max_4",
    },
    "minicpmv4_6": {
        "text_config": {
            **HYBRID,
            "model_type": "qwen3_5_text",
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        "vision_config": {**SIGLIP, "model_type": "minicpmv4_6_vision"},
        "insert_layer_id": 1,
        "image_token_id": 90,
    },
    # without the merger within the encoder
    "minicpmv4_6-4x": {
        "text_config": {
            **HYBRID,
            "model_type": "qwen3_5_text",
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        "vision_config": {**SIGLIP, "model_type": "minicpmv4_6_vision"},
        "downsample_mode": "4x",
        "image_token_id": 90,
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": PIXTRAL,
        "image_token_index": 90,
        "vision_feature_layer": -2,
        "multimodal_projector_bias": True,
    },
    "paligemma": {
        "text_config": {**TEXT, "model_type": "gemma2", "sliding_window": 128},
        "vision_config": {**SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": 90,
        "projection_dim": 64,
        "hidden_size": 64,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, "rope_parameters": ROPE},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 2]},
        "image_token_id": 90,
    },
    "qwen3_vl_moe": {
        "text_config": {
            **TEXT,
            "rope_parameters": ROPE,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0, 2]},
        "image_token_id": 90,
    },
    "qwen3_5": {
        "text_config": {**HYBRID, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        "vision_config": QWEN,
        "image_token_id": 90,
    },
}
#: An encoder of texts of up to 24 tokens.
DUAL_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: Encoders of texts beside encoders of images, whose vectors have 48 and 72 numbers.
DUAL: dict[str, dict[str, Any]] = {
    "clip": {"text_config": DUAL_TEXT, "vision_config": SIGLIP, "projection_dim": 48},
    "siglip": {"text_config": {**DUAL_TEXT, "projection_size": 72}, "vision_config": SIGLIP},
    "siglip2": {
        "text_config": {**DUAL_TEXT, "projection_size": 72},
        "vision_config": {**SIGLIP, "num_patches": 25},
    },
}


def vision_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model whose features are of the size of 1."""
    kind = name.partition("-")[0]
    given = DUAL[name] if name in DUAL else MODELS[name]
    config = transformers.CONFIG_MAPPING[kind](**{**given, **changes})
    torch.manual_seed(seed)
    kinds = transformers.AutoModel if name in DUAL else transformers.AutoModelForImageTextToText
    model = kinds.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() <= 1 else parameter[0].numel() ** -0.5
            parameter.normal_(0.3 if parameter.dim() <= 1 else 0.0, spread)
        for own, buffer in model.named_buffers():  # of Gemma 4
            end = own.rpartition("_")[2]
            if ".std_" in own or own.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
            elif end in ("min", "max"):  # of inputs of q, k and v they differ in one layer
                equal = "input" in own and ".layers.1." not in own
                buffer.fill_(1.0).mul_(1 if equal else torch.rand(()).add_(0.5))
                buffer.mul_(-0.9 if end == "min" else 0.7)
    return model


def image(config: VisionConfig, sizes: list[tuple[int, int]], seed: int) -> ImageInput:
    """An image with tiles of these heights and widths, of random pixels."""
    noise = np.random.default_rng(seed)
    side = config.patch * config.merge
    tiles = tuple(noise.integers(0, 256, (*size, 3), np.uint8) for size in sizes)
    grids = tuple((height // side, width // side) for height, width in sizes)
    if config.queries:
        grids = ((1, config.queries),) * len(tiles)
    count = sum(rows * columns for rows, columns in grids)
    return ImageInput(tiles, grids, count, bytes([seed]) * 32)


def picture(config: VisionConfig, size: tuple[int, int], seed: int) -> ImageInput:
    """An image of this size as a picture of the whole and tiles of a larger one; its number of
    tokens is not known here."""
    side = config.patch * math.isqrt(config.positions - int(config.class_token))
    height, width = best_size(config.pictures, *size)
    tiles = 1 + height * width // side**2
    return image(config, [(side, side)] * tiles, seed)._replace(size=size)


def normalized(tile: NDArray[np.uint8], config: VisionConfig) -> Tensor:
    """As transformers' processors do it: float32 ``[3, height, width]``."""
    scaled = torch.from_numpy((tile * config.scale).astype(np.float32))
    return ((scaled - torch.tensor(config.mean)) / torch.tensor(config.std)).permute(2, 0, 1)


def expected_rows(model: Any, config: VisionConfig, images: list[ImageInput]) -> list[Tensor]:
    """What transformers makes of each image."""
    name = model.config.model_type
    rows = _qwen_rows if name in FREE else _OTHERS.get(name, _rows)
    if config.family == "llava_pixtral":
        rows = _pixtral_rows
    return [rows(model, config, own) for own in images]


def padded_patches(tiles: list[Tensor], config: VisionConfig) -> dict[str, Tensor]:
    """As the processor of Gemma 4 hands tiles float32 ``[3, height, width]`` to the model: the
    colors of a pixel are neighbours, and a patch has its column and its row, -1 beyond the last."""
    side, most = config.patch, max(tile[0].numel() for tile in tiles) // config.patch**2
    patches = torch.zeros(len(tiles), most, 3 * side**2)
    places = torch.full((len(tiles), most, 2), -1)
    for i, tile in enumerate(tiles):
        down, right = (count // side for count in tile.shape[1:])
        own = tile.view(3, down, side, right, side).permute(1, 3, 2, 4, 0).reshape(down * right, -1)
        patches[i, : len(own)] = own
        rows, columns = torch.arange(down), torch.arange(right)
        places[i, : len(own)] = torch.cartesian_prod(rows, columns).flip(1)
    return {"pixel_values": patches, "image_position_ids": places}


def from_0_to_1(tile: NDArray[np.uint8]) -> Tensor:
    """float32 ``[3, height, width]``."""
    return torch.from_numpy((tile * (1 / 255)).astype(np.float32)).permute(2, 0, 1)


def _gemma4_rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    """With another image beside it, so that there is padding."""
    [tile] = own.tiles
    other = torch.zeros(3, tile.shape[0] + 2 * config.patch * config.merge, tile.shape[1])
    given = padded_patches([from_0_to_1(tile), other], config)
    with torch.no_grad():
        return _joined(model.get_image_features(**given).pooler_output[0])


def _joined(rows: Any) -> Tensor:
    """Rows of all tiles, which transformers gives as a list or as a tensor."""
    rows = torch.cat(list(rows)) if isinstance(rows, (list, tuple)) else rows
    return rows.reshape(-1, rows.shape[-1])


def _rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    pixels = torch.stack([normalized(tile, config) for tile in own.tiles])
    with torch.no_grad():
        return _joined(model.get_image_features(pixel_values=pixels).pooler_output)


def _idefics_rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    pixels = torch.stack([normalized(tile, config) for tile in own.tiles])
    with torch.no_grad():
        return _joined(model.get_image_features(pixel_values=pixels[None]).pooler_output)


def _pixtral_rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    [tile] = own.tiles
    pixels, sizes = normalized(tile, config)[None], torch.tensor([tile.shape[:2]])
    with torch.no_grad():
        found = model.get_image_features(pixel_values=pixels, image_sizes=sizes)
    return _joined(found.pooler_output)


def _siglip2_rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    """Tile by tile: its processors pad them to the size of the largest (LFM2-VL, NaFlex)."""
    found, side = [], config.patch
    for tile in own.tiles:
        pixels = normalized(tile, config)
        down, right = pixels.shape[1] // side, pixels.shape[2] // side
        parts = pixels.view(3, down, side, right, side).permute(1, 3, 2, 4, 0)
        patches, shape = parts.reshape(1, down * right, -1), torch.tensor([[down, right]])
        mask = torch.ones(1, down * right, dtype=torch.int32)
        with torch.no_grad():
            given = {"spatial_shapes": shape, "pixel_attention_mask": mask}
            found.append(_joined(model.get_image_features(patches, **given).pooler_output))
    return torch.cat(found)


def _minicpm_rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    """All tiles side by side, as its processor writes them."""
    pixels, sizes, side = [], [], config.patch
    for tile in own.tiles:
        values = normalized(tile, config)
        down, right = values.shape[1] // side, values.shape[2] // side
        parts = values.view(3, down, side, right, side).permute(0, 2, 1, 3, 4)
        pixels.append(parts.reshape(3, side, down * right * side))
        sizes.append([down, right])
    given = torch.cat(pixels, dim=2)[None], torch.tensor(sizes, dtype=torch.int32)
    with torch.no_grad():
        return _joined(model.get_image_features(*given).pooler_output)


def _anyres_rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    pixels, sizes = [normalized(tile, config) for tile in own.tiles], torch.tensor([own.size])
    with torch.no_grad():
        found = model.get_image_features(torch.stack(pixels)[None], sizes)
    return _joined(found.pooler_output)


_OTHERS = {
    "gemma4": _gemma4_rows,
    "llava_next": _anyres_rows,
    "llava_onevision": _anyres_rows,
    "idefics3": _idefics_rows,
    "lfm2_vl": _siglip2_rows,
    "siglip2": _siglip2_rows,
    "minicpmv4_6": _minicpm_rows,
    "mistral3": _pixtral_rows,
    "smolvlm": _idefics_rows,
}


def _qwen_rows(model: Any, config: VisionConfig, own: ImageInput) -> Tensor:
    """Patches in squares of those that are merged, twice each, as its processor writes them."""
    [tile] = own.tiles
    side, merge = config.patch, config.merge
    pixels = normalized(tile, config)
    down, right = pixels.shape[1] // side // merge, pixels.shape[2] // side // merge
    parts = pixels.view(3, down, merge, side, right, merge, side).permute(1, 4, 2, 5, 0, 3, 6)
    patches = parts.reshape(-1, 3, 1, side, side).expand(-1, 3, config.frames, side, side)
    grid = torch.tensor([[1, down * merge, right * merge]])
    with torch.no_grad():
        found = model.get_image_features(pixel_values=patches.flatten(1), image_grid_thw=grid)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return torch.cat([_joined(part) for part in parts], dim=1)
