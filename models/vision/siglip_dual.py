"""The encoder of images of SigLIP 1, and of SigLIP 2 with one size, beside that of texts: a learned
query attends to the patches.

transformers' modeling_siglip.py; Zhai et al. 2023, arXiv 2303.15343.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.configs.fields import MAX_VOCAB, Fields
from sdk.models.vision.config import VisionConfig, only
from sdk.models.vision.family import Family, VisionNames
from sdk.models.vision.positions import learned
from sdk.models.vision.siglip import LAYER, LAYER_NAMES, LAYERS, WHOLE_NAMES, siglip_config

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.projectors import AttentionPool

#: Of transformers' class: published configs leave out what equals them.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    only(vision, "model_type", "siglip_vision_model")
    only(vision, "vision_use_head", True)
    tower, patch, side = siglip_config(Fields({**_DEFAULTS, **vision.values}, vision.where))
    return VisionConfig(
        "siglip_dual",
        tower,
        patch,
        tower.hidden_size,
        token_id=text.count("vocab_size", MAX_VOCAB, default=32000),
        max_patches=side**2,
        max_tokens=1,
        merge=side,
        positions=side**2,
        one_size=True,
        stand_in=0,
        dual=True,
    )


def projector(source: Source, config: VisionConfig) -> AttentionPool:
    from sdk.models.vision.projectors import AttentionPool

    return AttentionPool(source, config)


NAMES = {
    **{name: own for name, own in WHOLE_NAMES.items() if name != "pooling"},
    "projector": "tower.head",
}

FAMILY = Family(
    ("siglip",),
    LAYER,
    VisionNames({"vision_model.": "tower."}, LAYERS, NAMES, LAYER_NAMES),
    read,
    projector,
    positions=learned,
    norm_after=True,
)
