"""Mistral Small 3.x and Ministral 3 with Pixtral's tower: images of all shapes, RMSNorms, gated
MLPs, rotation by row and column; squares of patches become one token.

transformers' modeling_pixtral.py and modeling_mistral3.py; Agrawal et al. 2024, arXiv 2410.07073.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import LayerRules
from sdk.models.configs.fields import MAX_WIDTH, Fields, activation_named
from sdk.models.vision.config import (
    CLIP_MEAN,
    CLIP_STD,
    VisionConfig,
    encoder_config,
    layers_until,
    square,
)
from sdk.models.vision.family import PROCESSOR, SHAPES, Family, MmprojRules, VisionNames
from sdk.models.vision.positions import taking_turns

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.config import EncoderSpec
    from sdk.models.vision.projectors import MergedMLP

#: Of all norms of the tower.
EPS = 1e-5
LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "mlp": "feed_forward",
}


def pixtral_tower(whole: Fields, vision: Fields) -> EncoderSpec:
    """The layers of the tower that run."""
    width, heads = (vision.count(k, MAX_WIDTH) for k in ("hidden_size", "num_attention_heads"))
    rope = Fields(vision.mapping("rope_parameters"), "config: vision_config: rope_parameters")
    theta = rope.positive("rope_theta", default=vision.positive("rope_theta", default=10000.0))
    head_dim = vision.count("head_dim", 4096, default=width // heads)
    if head_dim % 4 or head_dim * heads != width:
        vision.fail("head_dim", f"a multiple of 4 that divides {width} into {heads}", head_dim)
    return encoder_config(
        vision,
        eps=EPS,
        activation=vision.text("hidden_act", default="gelu"),
        layers=layers_until(whole, vision.count("num_hidden_layers", 512), -1),
        attention_bias=False,
        mlp_bias=False,
        rotary_dim=head_dim,
        theta=theta,
    )


def most_patches(whole: Fields, vision: Fields) -> int:
    """Of an image within a square of the longest edge."""
    size = Fields(Fields(whole.mapping(PROCESSOR)).mapping("size"), "image processor: size")
    longest = size.count("longest_edge", 1 << 16, default=square(vision, "image_size"))
    return max(longest // square(vision, "patch_size"), 1) ** 2


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    merge = whole.count("spatial_merge_size", 64, default=2)
    most = most_patches(whole, vision)
    key = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    activation = whole.text("projector_hidden_act", default="gelu")
    return VisionConfig(
        "pixtral",
        pixtral_tower(whole, vision),
        square(vision, "patch_size"),
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count(key, 1 << 24, default=10),
        max_patches=most,
        max_tokens=most // merge**2,
        merge=merge,
        projector_eps=text.positive("rms_norm_eps", default=1e-6),
        projector_activation=activation_named(activation, "projector_hidden_act"),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        norm_before=True,
    )


def projector(source: Source, config: VisionConfig) -> MergedMLP:
    from sdk.models.vision.projectors import MergedMLP

    return MergedMLP(source, config)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files of Pixtral 12B (:mod:`sdk.models.vision.llava_pixtral`) merge no patches."""
    vision = {**common, "model_type": "pixtral", "rope_theta": 10000.0}
    merge = keys.count("spatial_merge_size", 64, default=1)
    if (merge > 1) != ("mm.patch_merger.weight" in keys.values[SHAPES]):
        keys.fail("spatial_merge_size", "more than 1 where there is mm.patch_merger.weight", merge)
    if merge == 1:
        return vision, {"model_type": "llava", "vision_feature_select_strategy": "full"}
    return vision, {"model_type": "mistral3", "spatial_merge_size": merge}


FAMILY = Family(
    ("mistral3",),
    LayerRules(),
    VisionNames(
        {"vision_tower.": "tower.", "multi_modal_projector.": "projector."},
        "tower.transformer.layers",
        {
            "patches": "tower.patch_conv",
            "norm_before": "tower.ln_pre",
            "projector.merge": "projector.patch_merger.merging_layer",
            "projector": "projector",
        },
        LAYER_NAMES,
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("pixtral",),
        ("mistral", "ministral3", "llama"),
        ("[IMG]",),
        mmproj_config,
        lambda keys: {
            "projector.norm": "mm.input_norm",
            "projector.merge": "mm.patch_merger",
            "projector.linear_1": "mm.1",
            "projector.linear_2": "mm.2",
        },
        lambda keys: {"size": {"longest_edge": keys.count("image_size", 1 << 16)}},
        gelu="gelu",
        interleaved_qk=True,
        # a row of the text model's embeddings, which the prompt has as a token
        unused=("v.token_embd.img_break",),
    ),
    frequencies=taking_turns,
)
