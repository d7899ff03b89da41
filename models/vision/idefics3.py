"""Idefics 3 and SmolVLM: SigLIP on square tiles and a small picture of the whole image; squares of
patches become one token.

transformers' modeling_idefics3.py and modeling_smolvlm.py; granite-docling is one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.vision.config import VisionConfig
from sdk.models.vision.family import PROCESSOR, Family, MmprojRules, VisionNames
from sdk.models.vision.positions import nearest_part
from sdk.models.vision.siglip import LAYER, LAYER_NAMES, siglip_config

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.projectors import JoinedLinear

#: Pixels of the longer side of an image, where the checkpoint does not say it.
LONGEST = 4 * 364


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    tower, patch, side = siglip_config(vision)
    merge = whole.count("scale_factor", 64, default=2)
    if side % merge:
        whole.fail("scale_factor", f"a divisor of {side} patches", merge)
    tiles = _most_tiles(whole, patch * side)
    return VisionConfig(
        "idefics3",
        tower,
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count("image_token_id", 1 << 24, default=128257),
        max_patches=tiles * side**2,
        max_tokens=tiles * (side // merge) ** 2,
        merge=merge,
        positions=side**2,
    )


def _most_tiles(whole: Fields, side: int) -> int:
    """Tiles of the largest square image, and the picture of the whole."""
    size = Fields(Fields(whole.mapping(PROCESSOR)).mapping("size"), "image processor: size")
    across = -(-size.count("longest_edge", 1 << 16, default=LONGEST) // side)
    return across**2 + 1


def projector(source: Source, config: VisionConfig) -> JoinedLinear:
    from sdk.models.vision.projectors import JoinedLinear

    return JoinedLinear(source, config)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    merge = keys.count("projector.scale_factor", 64, default=2)
    return (
        {**common, "model_type": "idefics3_vision"},
        {"model_type": "idefics3", "scale_factor": merge},
    )


def mmproj_processor(keys: Fields) -> dict[str, Any]:
    longest = keys.count("preproc_image_size", 1 << 16, default=LONGEST)
    side = keys.count("image_size", 1 << 16)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}


FAMILY = Family(
    ("idefics3", "smolvlm"),
    LAYER,
    VisionNames(
        {"vision_model.": "", "connector.": "connector."},
        "encoder.layers",
        {
            "patches": "embeddings.patch_embedding",
            "positions.weight": "embeddings.position_embedding.weight",
            "norm": "post_layernorm",
            "projector.linear": "connector.modality_projection.proj",
        },
        LAYER_NAMES,
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("idefics3",),
        ("llama",),
        ("<image>",),
        mmproj_config,
        lambda keys: {"projector.linear": "mm.model.fc"},
        mmproj_processor,
    ),
    positions=nearest_part,
    norm_after=True,
)
