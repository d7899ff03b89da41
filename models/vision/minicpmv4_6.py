"""MiniCPM-V 4.6: SigLIP on slices of any shape; within the tower, and after it, squares of patches
become one row.

transformers' modeling_minicpmv4_6.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.vision.config import VisionConfig, only
from sdk.models.vision.family import PROCESSOR, SHAPES, Family, MmprojRules, VisionNames
from sdk.models.vision.positions import nearest_part
from sdk.models.vision.siglip import (
    LAYER,
    LAYER_NAMES,
    LAYERS,
    PREFIXES,
    WHOLE_NAMES,
    siglip_config,
)

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.projectors import JoinedMLP

#: Of transformers' class: published configs leave out what equals them.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
#: Sides of squares that become one row within the tower, and after it.
_SIDE = 2
_SQUARE = (_SIDE, _SIDE)


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    _only_pairs(whole, "merge_kernel_size")
    _only_pairs(vision, "window_kernel_size")
    only(whole, "merger_times", 1)
    only(whole, "drop_vision_last_layer", False)
    vision = Fields({**_DEFAULTS, **vision.values}, vision.where)
    tower, patch, side = siglip_config(vision)
    mode = whole.text("downsample_mode", default="16x")
    if mode not in ("4x", "16x"):
        whole.fail("downsample_mode", "'4x' or '16x'", mode)
    inner = _SIDE if mode == "16x" else 1
    after = whole.values.get("insert_layer_id", 6)
    if inner > 1 and (type(after) is not int or not 0 <= after < tower.num_layers):
        whole.fail("insert_layer_id", f"a layer of {tower.num_layers}", after)
    tokens = _most_tokens(whole, patch * _SIDE * inner)
    return VisionConfig(
        "minicpmv4_6",
        tower,
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count("image_token_id", 1 << 24),
        max_patches=tokens * (_SIDE * inner) ** 2,
        max_tokens=tokens,
        merge=_SIDE * inner,
        inner=inner,
        inner_after=after if inner > 1 else -1,
        positions=side**2,
        projector_eps=1e-6,
        projector_width=tower.hidden_size * _SIDE**2,
    )


def _only_pairs(fields: Fields, key: str) -> None:
    found = fields.values.get(key, _SQUARE)
    if isinstance(found, (list, tuple)):
        found = tuple(found)
    only(Fields({key: found}, fields.where), key, _SQUARE)


def _most_tokens(whole: Fields, unit: int) -> int:
    """Of an image: slices and a picture of the whole, whose shapes differ from squares."""
    processor = Fields(whole.mapping(PROCESSOR), "image processor")
    side = processor.count("scale_resolution", 1 << 16, default=448)
    slices = processor.count("max_slice_nums", 4096, default=9)
    return most_tokens(side, slices, unit)


def most_tokens(side: int, slices: int, unit: int) -> int:
    """The most tokens of an image that is cut into ``slices`` slices of about ``side`` by ``side``
    pixels. A token has ``unit`` by ``unit`` pixels. Sides are rounded to whole tokens, which makes
    long slices larger; an image a few hundred times longer than wide has more tokens, and is
    refused."""
    return (slices + 1) * max(side // unit, 1) ** 2 * 6 // 5


def projector(source: Source, config: VisionConfig) -> JoinedMLP:
    from sdk.models.vision.projectors import JoinedMLP

    return JoinedMLP(source, config, norm=True)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The size of images there is that of slices; that of the table of positions is in its
    shape."""
    rows = keys.values[SHAPES].get("v.position_embd.weight", (0,))[0]
    merge = keys.count("projector.scale_factor", 64, default=4)
    if merge not in (2, 4):
        keys.fail("projector.scale_factor", "2 or 4", merge)
    return (
        {
            **common,
            "model_type": "minicpmv4_6_vision",
            "image_size": math.isqrt(rows) * common["patch_size"],
        },
        {
            "model_type": "minicpmv4_6",
            "downsample_mode": "16x" if merge == 4 else "4x",
            "insert_layer_id": (keys.values.get("wa_layer_indexes") or [6])[0],
        },
    )


def mmproj_processor(keys: Fields) -> dict[str, Any]:
    return {"scale_resolution": keys.count("image_size", 1 << 16)}


_MERGER = "tower.vit_merger"
_FILE_MERGER = "v.vit_merger"

FAMILY = Family(
    ("minicpmv4_6",),
    LAYER,
    VisionNames(
        {**PREFIXES, "merger.": "merger."},
        LAYERS,
        {
            **{name: own for name, own in WHOLE_NAMES.items() if name != "pooling"},
            "inner.norm": f"{_MERGER}.layer_norm1",
            "inner.q_proj": f"{_MERGER}.self_attn.q_proj",
            "inner.k_proj": f"{_MERGER}.self_attn.k_proj",
            "inner.v_proj": f"{_MERGER}.self_attn.v_proj",
            "inner.o_proj": f"{_MERGER}.self_attn.out_proj",
            "inner.wide_norm": f"{_MERGER}.pre_norm",
            "inner.linear_1": f"{_MERGER}.linear_1",
            "inner.linear_2": f"{_MERGER}.linear_2",
            "projector.norm": "merger.mlp.0.pre_norm",
            "projector.linear_1": "merger.mlp.0.linear_1",
            "projector.linear_2": "merger.mlp.0.linear_2",
        },
        LAYER_NAMES,
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("minicpmv4_6",),
        ("qwen3_5_text",),
        ("<|image_pad|>",),
        mmproj_config,
        lambda keys: {
            "inner.norm": f"{_FILE_MERGER}.ln1",
            "inner.q_proj": f"{_FILE_MERGER}.attn_q",
            "inner.k_proj": f"{_FILE_MERGER}.attn_k",
            "inner.v_proj": f"{_FILE_MERGER}.attn_v",
            "inner.o_proj": f"{_FILE_MERGER}.attn_out",
            "inner.wide_norm": f"{_FILE_MERGER}.ds_ln",
            "inner.linear_1": f"{_FILE_MERGER}.ds_ffn_up",
            "inner.linear_2": f"{_FILE_MERGER}.ds_ffn_down",
            "projector.norm": "mm.input_norm",
            "projector.linear_1": "mm.up",
            "projector.linear_2": "mm.down",
        },
        mmproj_processor,
    ),
    positions=nearest_part,
    norm_after=True,
)
