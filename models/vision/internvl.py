"""InternVL 3: InternViT on square tiles, vectors that multiply what blocks add; squares of patches
become one token.

transformers' modeling_internvl.py; Zhu et al. 2025, arXiv 2504.10479.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import LAYER_NORM, LayerRules
from sdk.models.configs.fields import MAX_WIDTH, Fields, activation_named
from sdk.models.vision.config import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_SIDE,
    VisionConfig,
    encoder_config,
    layers_until,
    only,
    square_tiles,
)
from sdk.models.vision.family import PROCESSOR, SHAPES, Family, MmprojRules, VisionNames
from sdk.models.vision.positions import learned

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.projectors import JoinedMLP


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    for key, value in (
        ("norm_type", "layer_norm"),
        ("use_qk_norm", False),
        ("use_mean_pooling", True),
        ("use_mask_token", False),
        ("use_absolute_position_embeddings", True),
    ):
        only(vision, key, value)
    only(whole, "vision_feature_select_strategy", "default")
    ratio = whole.positive("downsample_ratio", default=0.5)
    merge = round(1 / ratio)
    patch, side = square_tiles(vision)
    if merge * ratio != 1 or side % merge:
        whole.fail("downsample_ratio", f"1 divided by a divisor of {side}", ratio)
    tiles = _most_tiles(whole)
    activation = whole.text("projector_hidden_act", default="gelu")
    return VisionConfig(
        "internvl",
        encoder_config(
            vision,
            eps=vision.positive("layer_norm_eps", default=1e-6),
            activation=vision.text("hidden_act", default="gelu"),
            layers=layers_until(whole, vision.count("num_hidden_layers", 512), -1),
            attention_bias=vision.flag("attention_bias", default=False),
            output_bias=True,
        ),
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count("image_token_id", 1 << 24, default=151667),
        max_patches=tiles * (side**2 + 1),
        max_tokens=tiles * (side // merge) ** 2,
        merge=merge,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        positions=side**2 + 1,
        one_size=True,
        projector_eps=1e-5,
        projector_activation=activation_named(activation, "projector_hidden_act"),
        class_token=True,
    )


def _most_tiles(whole: Fields) -> int:
    """With the picture of the whole image."""
    processor = Fields(whole.mapping(PROCESSOR), "image processor")
    return processor.count("max_patches", 4096, default=12) + 1


def projector(source: Source, config: VisionConfig) -> JoinedMLP:
    from sdk.models.vision.projectors import JoinedMLP

    return JoinedMLP(source, config, norm=True)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the metadata leave out is seen from the tensors: InternViT-6B has other norms."""
    tensors, layer = keys.values[SHAPES], "v.blk.0"
    vision = {
        "model_type": "internvl_vision",
        "norm_type": "layer_norm" if f"{layer}.ln1.bias" in tensors else "rms_norm",
        "use_qk_norm": f"{layer}.attn_q_norm.weight" in tensors,
        "attention_bias": f"{layer}.attn_q.bias" in tensors,
    }
    merge = keys.count("projector.scale_factor", 64, default=2)
    return {**common, **vision}, {"model_type": "internvl", "downsample_ratio": 1 / merge}


def mmproj_processor(keys: Fields) -> dict[str, Any]:
    side = keys.count("image_size", MAX_SIDE)
    return {
        "size": {"height": side, "width": side},
        "crop_to_patches": True,
        "min_patches": keys.count("preproc_min_tiles", 4096, default=1),
        "max_patches": keys.count("preproc_max_tiles", 4096, default=12),
    }


FAMILY = Family(
    ("internvl",),
    LayerRules(norm=LAYER_NORM, gated=False, block_scales=True),
    VisionNames(
        {"vision_tower.": "tower.", "multi_modal_projector.": "projector."},
        "tower.encoder.layer",
        {
            "patches": "tower.embeddings.patch_embeddings.projection",
            "positions.weight": "tower.embeddings.position_embeddings",
            "class_token": "tower.embeddings.cls_token",
            "projector.norm": "projector.layer_norm",
            "projector": "projector",
        },
        {
            "input_layernorm": "layernorm_before",
            "post_attention_layernorm": "layernorm_after",
            "self_attn.o_proj": "attention.projection_layer",
            "self_attn": "attention",
            "attention_scale": "lambda_1",
            "mlp_scale": "lambda_2",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        },
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("internvl",),
        ("qwen2", "qwen3", "qwen3_moe", "llama", "internlm2"),
        ("<IMG_CONTEXT>",),
        mmproj_config,
        lambda keys: {
            "projector.norm": "mm.model.mlp.0",
            "projector.linear_1": "mm.model.mlp.1",
            "projector.linear_2": "mm.model.mlp.3",
        },
        mmproj_processor,
        gelu="gelu",
    ),
    positions=learned,
)
