"""LFM2-VL: SigLIP 2 on images of all shapes, or on tiles of large ones; squares of patches become
one token.

transformers' modeling_lfm2_vl.py and modeling_siglip2.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.configs.fields import MAX_WIDTH, Fields, activation_named
from sdk.models.vision.config import VisionConfig, encoder_config, square
from sdk.models.vision.family import PROCESSOR, SHAPES, Family, MmprojRules, VisionNames
from sdk.models.vision.positions import smoothed
from sdk.models.vision.siglip import LAYER, LAYER_NAMES, LAYERS, PREFIXES, WHOLE_NAMES

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.projectors import JoinedMLP


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    patch, merge = square(vision, "patch_size"), whole.count("downsample_factor", 64, default=2)
    positions = vision.count("num_patches", 1 << 24, default=256)
    if math.isqrt(positions) ** 2 != positions:
        vision.fail("num_patches", "a square number", positions)
    activation = whole.text("projector_hidden_act", default="gelu")
    tokens = _most_tokens(whole, patch * merge)
    return VisionConfig(
        "lfm2_vl",
        encoder_config(
            vision,
            eps=vision.positive("layer_norm_eps", default=1e-6),
            activation=vision.text("hidden_act", default="gelu_pytorch_tanh"),
        ),
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count("image_token_id", 1 << 24, default=396),
        max_patches=tokens * merge**2,
        max_tokens=tokens,
        merge=merge,
        positions=positions,
        projector_norm=whole.flag("projector_use_layernorm", default=True),
        projector_eps=1e-5,
        projector_activation=activation_named(activation, "projector_hidden_act"),
        projector_width=whole.count("projector_hidden_size", MAX_WIDTH, default=2560),
    )


def _most_tokens(whole: Fields, unit: int) -> int:
    """Of an image: tiles and a picture of the whole."""
    processor = Fields(whole.mapping(PROCESSOR), "image processor")
    side = processor.count("tile_size", 1 << 16, default=512)
    tiles = processor.count("max_tiles", 4096, default=10)
    return tiles * (side // unit) ** 2 + processor.count("max_image_tokens", 1 << 20, default=256)


def projector(source: Source, config: VisionConfig) -> JoinedMLP:
    from sdk.models.vision.projectors import JoinedMLP

    return JoinedMLP(source, config, norm=config.projector_norm)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    shapes = keys.values[SHAPES]
    rows = {name: shape[0] for name, shape in shapes.items()}
    vision = {
        "model_type": "siglip2_vision_model",
        "num_patches": rows.get("v.position_embd.weight"),
    }
    whole = {
        "model_type": "lfm2_vl",
        "downsample_factor": keys.count("projector.scale_factor", 64, default=2),
        "projector_hidden_size": rows.get("mm.1.weight"),
        "projector_use_layernorm": "mm.input_norm.weight" in rows,
    }
    return {**common, **vision}, whole


FAMILY = Family(
    ("lfm2_vl",),
    LAYER,
    VisionNames(
        {**PREFIXES, "multi_modal_projector.": "projector."},
        LAYERS,
        {**WHOLE_NAMES, "projector.norm": "projector.layer_norm", "projector": "projector"},
        LAYER_NAMES,
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("lfm2",),
        ("lfm2", "lfm2_moe"),
        ("<image>",),
        mmproj_config,
        lambda keys: {
            "projector.norm": "mm.input_norm",
            "projector.linear_1": "mm.1",
            "projector.linear_2": "mm.2",
        },
    ),
    positions=smoothed,
    norm_after=True,
)
