"""LLaVA-OneVision: SigLIP, a larger picture of the image in tiles beside the whole one, which is
shrunk if it has many.

transformers' modeling_llava_onevision.py; Li et al. 2024, arXiv 2408.03326.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.configs.fields import MAX_WIDTH, Fields, activation_named
from sdk.models.vision.config import (
    CLIP_MEAN,
    CLIP_STD,
    VisionConfig,
    layers_until,
    only,
    picture_sizes,
)
from sdk.models.vision.family import Family, VisionNames
from sdk.models.vision.positions import learned
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


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    only(vision, "model_type", "siglip_vision_model")
    only(whole, "vision_feature_select_strategy", "full")
    run = layers_until(whole, vision.count("num_hidden_layers", 512), -1)
    tower, patch, side = siglip_config(vision, run)
    pixels = side * patch
    sizes = tuple((pixels * i, pixels * j) for i in range(1, 7) for j in range(1, 7))
    sizes = picture_sizes(whole, pixels, sizes)
    ratio = whole.text("vision_aspect_ratio", default="anyres_max_9")
    number = ratio.removeprefix("anyres_max_")
    if number == ratio or not number.isdecimal() or not 1 <= int(number) <= 4096:
        whole.fail("vision_aspect_ratio", "anyres_max_9 or the like", ratio)
    tiles = 1 + max(height * width for height, width in sizes) // pixels**2
    kept = 1 + 1.1**2 * int(number)
    key = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    activation = whole.text("projector_hidden_act", default="gelu")
    return VisionConfig(
        "llava_onevision",
        tower,
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count(key, 1 << 24, default=151646),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        max_patches=tiles * side**2,
        max_tokens=int(kept * side**2) + max(height // patch for height, _ in sizes),
        positions=side**2,
        one_size=True,
        projector_activation=activation_named(activation, "projector_hidden_act"),
        pictures=sizes,
        most_tiles=int(number),
    )


def projector(source: Source, config: VisionConfig) -> JoinedMLP:
    from sdk.models.vision.projectors import JoinedMLP

    return JoinedMLP(source, config, norm=False)


FAMILY = Family(
    ("llava_onevision",),
    LAYER,
    VisionNames(
        {**PREFIXES, "multi_modal_projector.": "projector.", "image_newline": "image_newline"},
        LAYERS,
        {**WHOLE_NAMES, "projector.newline": "image_newline", "projector": "projector"},
        LAYER_NAMES,
    ),
    read,
    projector,
    positions=learned,
)
