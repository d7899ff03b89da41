"""Qwen3-VL, its mixtures of experts and Qwen3.5: a table of positions stretched to the image and a
rotation by row and column; squares of patches become one token.

transformers' modeling_qwen3_vl.py and modeling_qwen3_5.py. Qwen3-VL adds features of some layers of
the tower to the first layers of the text model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import LAYER_NORM, LayerRules
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.vision.config import (
    CLIP_MEAN,
    CLIP_STD,
    VisionConfig,
    encoder_config,
    most_pixels,
    square,
    text_sections,
)
from sdk.models.vision.family import Family, MmprojRules, VisionNames
from sdk.models.vision.positions import bilinear, rows_then_columns

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.config import EncoderSpec
    from sdk.models.vision.projectors import MergerMLP

#: Where the checkpoint does not say it: 16,384 tokens.
MOST_PIXELS = 16384 * 32 * 32
EPS = 1e-6
#: Of Qwen3-VL and of Qwen3.5, whose text model turns a quarter of each head.
SECTIONS: dict[bool, tuple[int, int, int]] = {False: (24, 20, 20), True: (11, 11, 10)}


def qwen_tower(vision: Fields, activation: str) -> EncoderSpec:
    """The layers of the tower; ``activation``: where the config does not say it."""
    width, heads = vision.count("hidden_size", MAX_WIDTH), vision.count("num_heads", MAX_WIDTH)
    rope = Fields(vision.mapping("rope_parameters"), "config: vision_config: rope_parameters")
    if width % heads or width // heads % 4:
        vision.fail("num_heads", f"heads of a multiple of 4 of {width} features", heads)
    return encoder_config(
        vision,
        eps=EPS,
        activation=vision.text("hidden_act", default=activation),
        heads="num_heads",
        depth="depth",
        rotary_dim=width // heads,
        theta=rope.positive("rope_theta", default=10000.0),
    )


def qwen_config(
    family: str, tower: EncoderSpec, most: int, whole: Fields, vision: Fields, text: Fields
) -> VisionConfig:
    """What Qwen's families have in common. ``most``: pixels of the largest image, where the
    checkpoint does not say it."""
    hidden = text.count("hidden_size", MAX_WIDTH)
    if (out := vision.count("out_hidden_size", MAX_WIDTH)) != hidden:
        vision.fail("out_hidden_size", f"the text model's hidden_size, {hidden}", out)
    patch, merge = square(vision, "patch_size"), vision.count("spatial_merge_size", 64, default=2)
    most = most_pixels(whole, most) // patch**2
    return VisionConfig(
        family,
        tower,
        patch,
        hidden,
        token_id=whole.count("image_token_id", 1 << 24, default=151655),
        max_patches=most,
        max_tokens=most // merge**2,
        merge=merge,
        frames=vision.count("temporal_patch_size", 64, default=2),
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    tower = qwen_tower(vision, "gelu_pytorch_tanh")
    common = qwen_config("qwen3_vl", tower, MOST_PIXELS, whole, vision, text)
    new = str(whole.values.get("model_type")).startswith("qwen3_5")
    return replace(
        common,
        deepstack=ascending_layers(vision, "deepstack_visual_indexes", tower.num_layers),
        sections=text_sections(whole, text, SECTIONS[new]),
        interleaved=True,
        positions=vision.count("num_position_embeddings", 1 << 24),
    )


def ascending_layers(
    vision: Fields, key: str, layers: int, default: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Some layers of the tower."""
    found = vision.values.get(key, default)
    if not isinstance(found, (list, tuple)) or any(
        type(one) is not int or not 0 <= one < layers for one in found
    ):
        vision.fail(key, f"numbers of layers below {layers}", found)
    if list(found) != sorted({*found}):
        vision.fail(key, "numbers in ascending order", found)
    return tuple(found)


def projector(source: Source, config: VisionConfig) -> MergerMLP:
    from sdk.models.vision.projectors import MergerMLP

    return MergerMLP(source, config)


def deepstack(source: Source, config: VisionConfig, number: int) -> MergerMLP:
    from sdk.models.vision.projectors import PATH, MergerMLP

    return MergerMLP(source, config, f"{PATH}.deepstack.{number}", wide=True)


def qwen_words(common: dict[str, Any], keys: Fields) -> dict[str, Any]:
    """What the metadata of a file say, as Qwen's configs say it."""
    return {
        **common,
        "depth": common["num_hidden_layers"],
        "num_heads": common["num_attention_heads"],
        "out_hidden_size": keys.count("projection_dim", MAX_WIDTH),
        "spatial_merge_size": keys.count("spatial_merge_size", 64, default=2),
        "temporal_patch_size": 2,
    }


def pixel_range(keys: Fields, least: int, most: int) -> dict[str, Any]:
    """The sizes of images after resizing, where a file does not say them those of the model."""
    low = keys.count("image_min_pixels", 1 << 40, default=least)
    return {
        "min_pixels": low,
        "max_pixels": keys.count("image_max_pixels", 1 << 40, default=most),
    }


def deepstack_layers(keys: Fields) -> list[int]:
    """The layers whose results are features."""
    found = keys.values.get("is_deepstack_layers", [])
    return [layer for layer, has in enumerate(found) if has]


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    side = common["image_size"] // common["patch_size"]
    whole = str(text["model_type"]).removesuffix("_text")
    vision = {
        "model_type": f"{whole}_vision",
        "num_position_embeddings": side**2,
        "deepstack_visual_indexes": deepstack_layers(keys),
    }
    return {**qwen_words(common, keys), **vision}, {"model_type": whole}


def mmproj_names(keys: Fields) -> dict[str, str]:
    found = {
        "norm": "",  # called as in other towers, but of the merger
        "projector.norm": "v.post_ln",
        "projector.linear_fc1": "mm.0",
        "projector.linear_fc2": "mm.2",
    }
    for number, layer in enumerate(deepstack_layers(keys)):
        ours, theirs = f"projector.deepstack.{number}", f"v.deepstack.{layer}"
        found[f"{ours}.norm"] = f"{theirs}.norm"
        found[f"{ours}.linear_fc1"] = f"{theirs}.fc1"
        found[f"{ours}.linear_fc2"] = f"{theirs}.fc2"
    return found


FAMILY = Family(
    ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    LayerRules(norm=LAYER_NORM, gated=False),
    VisionNames(
        {"visual.": ""},
        "blocks",
        {
            "patches": "patch_embed.proj",
            "positions.weight": "pos_embed.weight",
            "projector": "merger",
            "projector.deepstack": "deepstack_merger_list",
        },
        {
            "input_layernorm": "norm1",
            "post_attention_layernorm": "norm2",
            "self_attn.qkv_proj": "attn.qkv",
            "self_attn.o_proj": "attn.proj",
            "mlp.up_proj": "mlp.linear_fc1",
            "mlp.down_proj": "mlp.linear_fc2",
        },
    ),
    read,
    projector,
    deepstack=deepstack,
    mmproj=MmprojRules(
        ("qwen3vl_merger",),
        (
            *("qwen3_vl_text", "qwen3_vl_moe_text"),
            *("qwen3_5_text", "qwen3_5_moe_text"),
        ),
        ("<|image_pad|>",),
        mmproj_config,
        mmproj_names,
        lambda keys: pixel_range(keys, 256 * 256, MOST_PIXELS),
    ),
    positions=bilinear,
    frequencies=rows_then_columns,
)
