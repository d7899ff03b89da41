"""LLaVA-Next (1.6): LLaVA 1.5 with a larger picture of the image in tiles beside the whole one.

transformers' modeling_llava_next.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sdk.models.configs.fields import Fields
from sdk.models.vision.config import VisionConfig, picture_sizes, square
from sdk.models.vision.llava import FAMILY as LLAVA, read as read_llava

if TYPE_CHECKING:
    from sdk.models.vision.family import Family

#: Where a config does not say them.
SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    one = read_llava(whole, vision, text)
    side = square(vision, "image_size")
    sizes = picture_sizes(whole, side, SIZES)
    tiles = 1 + max(height * width for height, width in sizes) // side**2
    ends = max(height // side for height, _ in sizes) * (side // one.patch)
    return replace(
        one,
        family="llava_next",
        max_patches=tiles * one.max_patches,
        max_tokens=tiles * one.max_tokens + ends,
        pictures=sizes,
    )


FAMILY: Family = LLAVA._replace(
    model_types=("llava_next",),
    read=read,
    mmproj=None,  # files are found by those of LLaVA 1.5
    names=LLAVA.names._replace(
        prefixes={**LLAVA.names.prefixes, "image_newline": "image_newline"},
        whole={**LLAVA.names.whole, "projector.newline": "image_newline"},
    ),
)
