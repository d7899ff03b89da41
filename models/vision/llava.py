"""LLaVA 1.5 with the tower of CLIP: tiles of one size, the layer before the last one, two matrices.

transformers' modeling_llava.py and modeling_clip.py; Liu et al. 2023, arXiv 2310.03744.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.config_fields import MAX_WIDTH, Fields, activation_named
from sdk.models.vision.config import (
    CLIP_MEAN,
    CLIP_STD,
    VisionConfig,
    encoder_config,
    layers_until,
    only,
    square_tiles,
)
from sdk.models.vision.family import Family, VisionNames
from sdk.models.vision.positions import learned
from sdk.models.vision.siglip import LAYER, LAYER_NAMES, LAYERS, PREFIXES, WHOLE_NAMES

if TYPE_CHECKING:
    from sdk.models.layers import Source
    from sdk.models.vision.projectors import JoinedMLP


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    only(vision, "model_type", "clip_vision_model")
    only(whole, "vision_feature_select_strategy", "default")
    patch, side = square_tiles(vision)
    key = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    activation = whole.text("projector_hidden_act", default="gelu")
    return VisionConfig(
        "llava",
        encoder_config(
            vision,
            eps=vision.positive("layer_norm_eps", default=1e-5),
            activation=vision.text("hidden_act", default="quick_gelu"),
            layers=layers_until(whole, vision.count("num_hidden_layers", 512, default=12), -2),
        ),
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count(key, 1 << 24, default=32000),
        max_patches=side**2 + 1,
        max_tokens=side**2,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        positions=side**2 + 1,
        one_size=True,
        projector_activation=activation_named(activation, "projector_hidden_act"),
        class_token=True,
    )


def projector(source: Source, config: VisionConfig) -> JoinedMLP:
    from sdk.models.vision.projectors import JoinedMLP

    return JoinedMLP(source, config, norm=False)


FAMILY = Family(
    ("llava",),
    LAYER,
    VisionNames(
        {**PREFIXES, "multi_modal_projector.": "projector."},
        LAYERS,
        {
            **WHOLE_NAMES,
            "class_token": "tower.embeddings.class_embedding",
            "norm_before": "tower.pre_layrnorm",
            "projector": "projector",
        },
        LAYER_NAMES,
    ),
    read,
    projector,
    positions=learned,
    norm_before=True,
)
