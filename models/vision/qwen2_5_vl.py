"""Qwen2.5-VL: most layers see windows; RMSNorms, gated MLPs, rotation by row and column.

transformers' modeling_qwen2_5_vl.py; Bai et al. 2025, arXiv 2502.13923.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdk.models.architecture import LayerRules
from sdk.models.configs.fields import Fields
from sdk.models.vision.config import VisionConfig, text_sections
from sdk.models.vision.family import Family, MmprojRules, VisionNames
from sdk.models.vision.positions import rows_then_columns
from sdk.models.vision.qwen3_vl import (
    ascending_layers,
    pixel_range,
    projector,
    qwen_config,
    qwen_tower,
    qwen_words,
)

#: Where the checkpoint does not say it: 16,384 tokens.
MOST_PIXELS = 16384 * 28 * 28


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    tower = qwen_tower(vision, "silu")
    common = qwen_config("qwen2_5_vl", tower, MOST_PIXELS, whole, vision, text)
    unit = common.patch * common.merge
    window = vision.count("window_size", 1 << 16, default=112) // unit
    if not window:
        vision.fail("window_size", f"at least {unit} pixels", vision.values["window_size"])
    return replace(
        common,
        sections=text_sections(whole, text, (16, 24, 24)),
        window=window * common.merge,
        # transformers' default names layers that a smaller tower does not have
        full=tuple(
            layer
            for layer in ascending_layers(vision, "fullatt_block_indexes", 512, (7, 15, 23, 31))
            if layer < tower.num_layers
        ),
    )


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Some layers, at equal distances, see whole images; windows are as in all published models."""
    layers, every = common["num_hidden_layers"], keys.count("n_wa_pattern", 512)
    full = [layer for layer in range(layers) if (layer + 1) % every == 0]
    window = keys.count("window_size", 1 << 16, default=112)
    vision = {"model_type": "qwen2_5_vl_vision", "window_size": window}
    return (
        {**qwen_words(common, keys), **vision, "fullatt_block_indexes": full},
        {"model_type": "qwen2_5_vl"},
    )


FAMILY = Family(
    ("qwen2_5_vl",),
    LayerRules(),
    VisionNames(
        {"visual.": ""},
        "blocks",
        {
            "patches": "patch_embed.proj",
            "projector.norm": "merger.ln_q",
            "projector.linear_fc1": "merger.mlp.0",
            "projector.linear_fc2": "merger.mlp.2",
        },
        {
            "input_layernorm": "norm1",
            "post_attention_layernorm": "norm2",
            "self_attn.qkv_proj": "attn.qkv",
            "self_attn.o_proj": "attn.proj",
            "mlp": "mlp",
        },
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("qwen2.5vl_merger",),
        ("qwen2_vl_text",),
        ("<|image_pad|>",),
        mmproj_config,
        lambda keys: {
            "norm": "",  # called as in other towers, but of the merger
            "projector.norm": "v.post_ln",
            "projector.linear_fc1": "mm.0",
            "projector.linear_fc2": "mm.2",
        },
        lambda keys: pixel_range(keys, 56 * 56, MOST_PIXELS),
    ),
    frequencies=rows_then_columns,
)
