"""PaliGemma 1 and 2: SigLIP on square tiles, one matrix; the tokens of a prompt with an image see
each other both ways.

transformers' modeling_paligemma.py; Beyer et al. 2024, arXiv 2407.07726. Its positions begin at 1,
which changes no difference between two positions and so no score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.configs.fields import MAX_VOCAB, MAX_WIDTH, Fields
from sdk.models.vision.config import VisionConfig, only
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
    from sdk.models.vision.projectors import JoinedLinear

#: Tokens of text for which a step has room beside those of an image.
TEXT = 256


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    only(vision, "model_type", "siglip_vision_model")
    tower, patch, side = siglip_config(vision)
    key = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    token, vocab = whole.count(key, 1 << 24, default=256000), text.count("vocab_size", MAX_VOCAB)
    if token >= vocab:
        whole.fail(key, f"a token of {vocab}", token)
    return VisionConfig(
        "paligemma",
        tower,
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=token,
        max_patches=side**2,
        max_tokens=side**2,
        both_ways="prompt",
        span=side**2 + TEXT,
        positions=side**2,
    )


def projector(source: Source, config: VisionConfig) -> JoinedLinear:
    from sdk.models.vision.projectors import JoinedLinear

    return JoinedLinear(source, config)


FAMILY = Family(
    ("paligemma",),
    LAYER,
    VisionNames(
        {**PREFIXES, "multi_modal_projector.": "projector."},
        LAYERS,
        {**WHOLE_NAMES, "projector.linear": "projector.linear"},
        LAYER_NAMES,
    ),
    read,
    projector,
    positions=learned,
    norm_after=True,
    # transformers 5 writes true; what sees what does not depend on it
    of_images=("use_bidirectional_attention", "num_image_tokens"),
)
