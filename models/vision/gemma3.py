"""Gemma 3: SigLIP on square tiles, average pool to a square of tokens, norm, one matrix.

transformers' modeling_gemma3.py and modeling_siglip.py. Tokens of an image see each other both ways
in all layers of the text model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.family import Family, MmprojRules, VisionNames
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
    from sdk.models.vision.projectors import PooledLinear

#: Crops beside the whole image, with pan and scan.
CROPS = 4


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    tower, patch, side = siglip_config(vision)
    tokens = whole.count("mm_tokens_per_image", side * side, default=256)
    tokens_per_side = math.isqrt(tokens)
    if tokens_per_side**2 != tokens or side % tokens_per_side:
        whole.fail("mm_tokens_per_image", f"the square of a divisor of {side}", tokens)
    key = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    return VisionConfig(
        "gemma3",
        tower,
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count(key, 1 << 24, default=262144),
        max_patches=(CROPS + 1) * side * side,
        max_tokens=(CROPS + 1) * tokens,
        merge=side // tokens_per_side,
        both_ways="all",
        span=tokens,
        positions=side * side,
        one_size=True,
    )


def projector(source: Source, config: VisionConfig) -> PooledLinear:
    from sdk.models.vision.projectors import PooledLinear

    return PooledLinear(source, config, offset=0.0 if source.checkpoint.format == "gguf" else 1.0)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files leave the side of a square of patches out if it is 4."""
    side = common["image_size"] // common["patch_size"]
    merge = keys.count("projector.scale_factor", 64, default=4)
    tokens = (side // merge) ** 2
    return (
        {**common, "model_type": "siglip_vision_model"},
        {"model_type": "gemma3", "mm_tokens_per_image": tokens},
    )


FAMILY = Family(
    ("gemma3",),
    LAYER,
    VisionNames(
        {**PREFIXES, "multi_modal_projector.": "projector."},
        LAYERS,
        {
            **WHOLE_NAMES,
            "projector.norm": "projector.mm_soft_emb_norm",
            "projector.linear.weight": "projector.mm_input_projection_weight",
        },
        LAYER_NAMES,
        turned=("projector.linear",),
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("gemma3",),
        ("gemma3_text",),
        ("<image_soft_token>",),
        mmproj_config,
        lambda keys: {
            "projector.norm": "mm.soft_emb_norm",
            "projector.linear": "mm.input_projection",
        },
        turned=("projector.linear",),
    ),
    positions=learned,
    norm_after=True,
)
