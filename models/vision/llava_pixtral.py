"""Pixtral 12B: LLaVA's two matrices after a tower that reads images of all shapes.

transformers' modeling_llava.py and modeling_pixtral.py; Agrawal et al. 2024, arXiv 2410.07073. Each
patch is a token, unlike in Mistral Small 3 (:mod:`sdk.models.vision.pixtral`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.models.vision.config import VisionConfig, only
from sdk.models.vision.llava import projector
from sdk.models.vision.pixtral import FAMILY as PIXTRAL, read as read_pixtral

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields
    from sdk.models.vision.family import Family


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    only(whole, "vision_feature_select_strategy", "full")
    one = read_pixtral(whole, vision, text)
    return replace(one, family="llava_pixtral", merge=1, max_tokens=one.max_patches)


FAMILY: Family = PIXTRAL._replace(
    model_types=("llava",),
    read=read,
    projector=projector,
    mmproj=None,  # files are found by those of Mistral Small 3
)
