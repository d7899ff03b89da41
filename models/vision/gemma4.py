"""Gemma 4: images of all shapes, a learned row for each column and for each row of patches, norms
around each block and of queries, keys and values; squares of patches become one token.

transformers' modeling_gemma4.py. In models without embeddings for each layer the tokens of an image
see each other both ways in the text model's layers with a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import NORMS_AROUND, LayerRules
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.vision.config import RAW, VisionConfig, encoder_config, only
from sdk.models.vision.family import PROCESSOR, SHAPES, Family, MmprojRules, VisionNames
from sdk.models.vision.positions import column_and_row, columns_then_rows

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.config import EncoderSpec
    from sdk.models.vision.projectors import StandardizedLinear

#: Tokens of an image, where the checkpoint does not say it.
TOKENS = 280
LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    "pre_feedforward_layernorm": "pre_feedforward_layernorm",
    "post_feedforward_layernorm": "post_feedforward_layernorm",
    **{f"self_attn.{part}_proj.weight": f"self_attn.{part}_proj.linear.weight" for part in "qkvo"},
    **{
        f"mlp.{part}_proj.weight": f"mlp.{part}_proj.linear.weight"
        for part in ("gate", "up", "down")
    },
    "self_attn": "self_attn",
    "mlp": "mlp",
}


def _tower(vision: Fields) -> EncoderSpec:
    heads = vision.count("num_attention_heads", MAX_WIDTH)
    only(vision, "num_key_value_heads", heads)
    only(vision, "attention_bias", False)
    rope = Fields(vision.mapping("rope_parameters"), "config: vision_config: rope_parameters")
    if rope.has("rope_type"):
        only(rope, "rope_type", "axial")
    head_dim = vision.count("head_dim", 4096, default=64)
    if head_dim % 4:
        vision.fail("head_dim", "a multiple of 4", head_dim)
    return encoder_config(
        Fields({"head_dim": head_dim, **vision.values}, vision.where),
        eps=vision.positive("rms_norm_eps", default=1e-6),
        activation=vision.text("hidden_activation", default="gelu_pytorch_tanh"),
        attention_bias=False,
        mlp_bias=False,
        rotary_dim=head_dim,
        theta=rope.positive("rope_theta", default=100.0),
        attention_scale=1.0,
    )


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    merge = vision.count("pooling_kernel_size", 64, default=3)
    processor = Fields(whole.mapping(PROCESSOR), "image processor")
    tokens = processor.count("max_soft_tokens", 1 << 16, default=TOKENS)
    positions = vision.count("position_embedding_size", 1 << 20, default=10240)
    if positions < tokens * merge:  # of an image that is one row of tokens
        vision.fail("position_embedding_size", f"at least {tokens * merge}", positions)
    both = text.values.get("use_bidirectional_attention") == "vision"
    per_layer = text.values.get("hidden_size_per_layer_input", 0)
    padding = text.values.get("pad_token_id", 0)
    if per_layer and (type(padding) is not int or not 0 <= padding < 1 << 24):
        text.fail("pad_token_id", "a token id", padding)
    return VisionConfig(
        "gemma4",
        _tower(vision),
        vision.count("patch_size", MAX_WIDTH, default=16),
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count("image_token_id", 1 << 24, default=258880),
        max_patches=tokens * merge**2,
        max_tokens=tokens,
        merge=merge,
        mean=RAW[0],
        std=RAW[1],
        both_ways="windows" if both else None,
        span=tokens if both else 0,
        positions=2 * positions,
        standardized=vision.flag("standardize", default=False),
        clipped=vision.flag("use_clipped_linears", default=False),
        stand_in=padding if per_layer else None,
    )


def projector(source: Source, config: VisionConfig) -> StandardizedLinear:
    from sdk.models.vision.projectors import StandardizedLinear

    return StandardizedLinear(source, config)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files say some sizes by their tensors alone."""
    shapes = keys.values[SHAPES]
    heads, positions = (
        shapes.get(name, ()) for name in ("v.blk.0.attn_q_norm.weight", "v.position_embd.weight")
    )
    if len(heads) != 1 or len(positions) != 3:
        keys.fail("projector_type", "the norms and positions of a tower of Gemma 4", "others")
    return (
        {
            **common,
            "model_type": "gemma4_vision",
            "rms_norm_eps": common["layer_norm_eps"],
            "hidden_activation": "gelu_pytorch_tanh",
            "head_dim": heads[0],
            "pooling_kernel_size": keys.count("projector.scale_factor", 64, default=3),
            "position_embedding_size": positions[1],
            "standardize": "v.std_bias" in shapes,
            "use_clipped_linears": True,  # where there are ranges
        },
        {"model_type": "gemma4"},
    )


FAMILY = Family(
    ("gemma4",),
    LayerRules(norms=NORMS_AROUND, qk_norm="head", v_norm=True, halves_apart=True),
    VisionNames(
        {"vision_tower.": "tower.", "embed_vision.": "projector."},
        "tower.encoder.layers",
        {
            "patches": "tower.patch_embedder.input_proj",
            "positions.weight": "tower.patch_embedder.position_embedding_table",
            "projector.bias": "tower.std_bias",
            "projector.scale": "tower.std_scale",
            "projector.linear": "projector.embedding_projection",
        },
        LAYER_NAMES,
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("gemma4v",),
        ("gemma4_text",),
        ("<|image|>",),
        mmproj_config,
        lambda keys: {
            "projector.bias": "v.std_bias",
            "projector.scale": "v.std_scale",
            "projector.linear": "mm.input_projection",
        },
        layer={
            "post_attention_layernorm": "attn_post_norm",
            "pre_feedforward_layernorm": "ln2",
            "post_feedforward_layernorm": "ffn_post_norm",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
        },
    ),
    positions=column_and_row,
    frequencies=columns_then_rows,
    recentred=True,
)
