"""The encoder of images of SigLIP 2 for all shapes (NaFlex), beside that of texts: as many patches
as a number allows, positions stretched to the shape, a learned query that attends to the patches.

transformers' modeling_siglip2.py; Tschannen et al. 2025, arXiv 2502.14786.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sdk.models.configs.fields import MAX_VOCAB, Fields
from sdk.models.vision.config import VisionConfig, encoder_config, only, square
from sdk.models.vision.family import PROCESSOR, Family, VisionNames
from sdk.models.vision.positions import smoothed
from sdk.models.vision.siglip import LAYER, LAYER_NAMES, LAYERS
from sdk.models.vision.siglip_dual import NAMES

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.projectors import AttentionPoolOfTiles

#: Of transformers' class: published configs leave out what equals them.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_patches": 256,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
}


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    only(vision, "model_type", "siglip2_vision_model")
    only(vision, "vision_use_head", True)
    vision = Fields({**_DEFAULTS, **vision.values}, vision.where)
    positions = vision.count("num_patches", 1 << 24)
    if math.isqrt(positions) ** 2 != positions:
        vision.fail("num_patches", "a square number", positions)
    tower = encoder_config(
        vision,
        eps=vision.positive("layer_norm_eps", default=1e-6),
        activation=vision.text("hidden_act"),
    )
    processor = Fields(whole.mapping(PROCESSOR), "image processor")
    return VisionConfig(
        "siglip2_dual",
        tower,
        square(vision, "patch_size"),
        tower.hidden_size,
        token_id=text.count("vocab_size", MAX_VOCAB, default=32000),
        max_patches=processor.count("max_num_patches", 1 << 20, default=256),
        max_tokens=1,
        queries=1,
        positions=positions,
        stand_in=0,
        dual=True,
    )


def projector(source: Source, config: VisionConfig) -> AttentionPoolOfTiles:
    from sdk.models.vision.projectors import AttentionPoolOfTiles

    return AttentionPoolOfTiles(source, config)


FAMILY = Family(
    ("siglip2",),
    LAYER,
    VisionNames({"vision_model.": "tower."}, LAYERS, NAMES, LAYER_NAMES),
    read,
    projector,
    positions=smoothed,
    norm_after=True,
)
