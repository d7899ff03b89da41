"""The encoder of images of CLIP, beside that of texts: the class token, a norm, one matrix.

transformers' modeling_clip.py; Radford et al. 2021, arXiv 2103.00020.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.configs.fields import MAX_VOCAB, MAX_WIDTH, Fields
from sdk.models.vision.config import (
    CLIP_MEAN,
    CLIP_STD,
    VisionConfig,
    encoder_config,
    only,
    square_tiles,
)
from sdk.models.vision.family import Family, VisionNames
from sdk.models.vision.positions import learned
from sdk.models.vision.siglip import LAYER, LAYER_NAMES, LAYERS, WHOLE_NAMES

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.projectors import Linear

#: Of transformers' class: published configs leave out what equals them.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "layer_norm_eps": 1e-5,
    "hidden_act": "quick_gelu",
}


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    only(vision, "model_type", "clip_vision_model")
    vision = Fields({**_DEFAULTS, **vision.values}, vision.where)
    patch, side = square_tiles(vision)
    return VisionConfig(
        "clip_dual",
        encoder_config(
            vision,
            eps=vision.positive("layer_norm_eps"),
            activation=vision.text("hidden_act"),
        ),
        patch,
        whole.count("projection_dim", MAX_WIDTH, default=512),
        token_id=text.count("vocab_size", MAX_VOCAB, default=49408),
        max_patches=side**2 + 1,
        max_tokens=1,
        merge=side,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        positions=side**2 + 1,
        one_size=True,
        class_token=True,
        norm_before=True,
        stand_in=0,
        dual=True,
    )


def projector(source: Source, config: VisionConfig) -> Linear:
    from sdk.models.vision.projectors import Linear

    return Linear(source, config)


FAMILY = Family(
    ("clip",),
    LAYER,
    VisionNames(
        {"vision_model.": "tower.", "visual_projection.": "projector."},
        LAYERS,
        {
            **WHOLE_NAMES,
            "class_token": "tower.embeddings.class_embedding",
            "norm_before": "tower.pre_layrnorm",
            "projector.linear": "projector",
        },
        LAYER_NAMES,
    ),
    read,
    projector,
    positions=learned,
    norm_after=True,
)
