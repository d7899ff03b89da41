"""MiniCPM-V 2.6, 4.0 and 4.5: SigLIP on slices of any shape; 64 learned queries to the patches of a
slice become tokens.

The code beside the published weights (modeling_minicpmv.py, resampler.py); Yao et al. 2024, arXiv
2408.01800.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.configs.fields import MAX_WIDTH, Fields, without_null
from sdk.models.vision.config import HALF, VisionConfig, color, only
from sdk.models.vision.family import (
    MINICPMV_TEXTS,
    PROCESSOR,
    SHAPES,
    Family,
    MmprojRules,
    VisionNames,
)
from sdk.models.vision.minicpmv4_6 import most_tokens
from sdk.models.vision.positions import nearest_part
from sdk.models.vision.siglip import LAYER, LAYER_NAMES, LAYERS, WHOLE_NAMES, siglip_config
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.resampler import Resampler

#: Of the code beside the weights: configs leave out what equals them.
_DEFAULTS = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 980,
    "patch_size": 14,
}
#: ``clip.minicpmv_version`` of files whose slices are marked as here: 2.6, 4.0, 4.5 and their
#: relatives that hear (o 2.6, o 4.5).
_VERSIONS = (3, 4, 5, 6, 100045)


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    vision = Fields({**_DEFAULTS, **vision.values}, vision.where)
    only(whole, "drop_vision_last_layer", False)
    tower, patch, side = siglip_config(vision)
    queries = whole.count("query_num", 4096, default=64)
    size, slices = slice_sizes(whole)
    token = whole.values.get("image_token_id")  # <unk>, the first one in vocabularies like Llama's
    if type(token) is not int or not 0 <= token < 1 << 24:
        whole.fail("image_token_id", "the id of a token", token)
    processor = Fields(without_null(whole.mapping(PROCESSOR)), "image processor")
    return VisionConfig(
        "minicpmv",
        tower,
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=token,
        max_patches=most_tokens(size, slices, patch),
        max_tokens=(slices + 1) * queries,
        queries=queries,
        positions=side**2,
        mean=color(processor, "norm_mean", HALF),
        std=color(processor, "norm_std", HALF),
    )


def slice_sizes(whole: Fields) -> tuple[int, int]:
    """The side of a square of the area of a slice, in pixels, and how many slices there are."""
    processor = Fields(without_null(whole.mapping(PROCESSOR)), "image processor")
    own = Fields(without_null(whole.mapping("slice_config")), "config: slice_config")
    size = own.count("scale_resolution", 1 << 16, default=448)
    slices = own.count("max_slice_nums", 4096, default=9)
    return (
        processor.count("scale_resolution", 1 << 16, default=size),
        processor.count("max_slice_nums", 4096, default=slices),
    )


def projector(source: Source, config: VisionConfig) -> Resampler:
    from sdk.models.vision.resampler import Resampler

    return Resampler(source, config)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The size of images there is that of slices; that of the table of positions is in its
    shape."""
    version = keys.values.get("minicpmv_version")
    if version not in _VERSIONS:
        raise UnsupportedError(
            f"{keys.where.partition(': ')[0]}: clip.minicpmv_version: expected one of "
            f"{', '.join(map(str, _VERSIONS))} (MiniCPM-V 2.6, 4.0, 4.5), found {version!r}: its "
            "slices are marked otherwise; limit_mm_per_prompt={'image': 0} opens the text alone"
        )
    shapes = keys.values[SHAPES]
    rows = shapes.get("v.position_embd.weight", (0,))[0]
    return (
        {
            **common,
            "model_type": "siglip_vision_model",
            "image_size": math.isqrt(rows) * common["patch_size"],
        },
        {"model_type": "minicpmv", "query_num": shapes.get("resampler.query", (0,))[0]},
    )


def mmproj_processor(keys: Fields) -> dict[str, Any]:
    return {"scale_resolution": keys.count("image_size", 1 << 16)}


FAMILY = Family(
    ("minicpmv",),
    LAYER,
    VisionNames(
        {"vpm.": "tower.", "resampler.": "resampler."},
        LAYERS,
        {
            **{name: own for name, own in WHOLE_NAMES.items() if name != "pooling"},
            "projector.attention": "resampler.attn",
            "projector.last.weight": "resampler.proj",
            "projector": "resampler",
        },
        LAYER_NAMES,
        turned=("projector.last",),
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("resampler",),
        tuple(MINICPMV_TEXTS.values()),
        ("<unk>",),
        mmproj_config,
        lambda keys: {
            "projector.kv_proj": "resampler.kv",
            "projector.attention.q_proj": "resampler.attn.q",
            "projector.attention.k_proj": "resampler.attn.k",
            "projector.attention.v_proj": "resampler.attn.v",
            "projector.attention.out_proj": "resampler.attn.out",
            "projector.ln_kv": "resampler.ln_kv",
            "projector.ln_q": "resampler.ln_q",
            "projector.ln_post": "resampler.ln_post",
            "projector.query": "resampler.query",
            "projector.last": "resampler.proj",
        },
        mmproj_processor,
        last="resampler.proj.weight",
        unused=("resampler.pos_embed_k",),
    ),
    positions=nearest_part,
    norm_after=True,
)
