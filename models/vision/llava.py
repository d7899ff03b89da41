"""LLaVA 1.5 with the tower of CLIP or of SigLIP: tiles of one size, one or several layers of the
tower, two matrices.

transformers' modeling_llava.py, modeling_clip.py and modeling_siglip.py; Liu et al. 2023, arXiv
2310.03744.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.configs.fields import MAX_WIDTH, Fields, activation_named
from sdk.models.vision.config import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_SIDE,
    VisionConfig,
    encoder_config,
    layers_read,
    only,
    square_tiles,
)
from sdk.models.vision.family import SHAPES, Family, MmprojRules, VisionNames
from sdk.models.vision.positions import learned
from sdk.models.vision.siglip import (
    LAYER,
    LAYER_NAMES,
    LAYERS,
    PREFIXES,
    WHOLE_NAMES,
    siglip_config,
)
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.source import Source
    from sdk.models.vision.config import EncoderSpec
    from sdk.models.vision.projectors import JoinedMLP


#: The types of the towers with a class token and without one.
CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


def read(whole: Fields, vision: Fields, text: Fields) -> VisionConfig:
    tower = vision.text("model_type", default=CLIP)
    if tower not in (CLIP, SIGLIP):
        raise UnsupportedError(
            f"{vision.where}: model_type: expected {CLIP!r}, {SIGLIP!r} or 'pixtral', found "
            f"{tower[:80]!r}: images of such a model are not supported"
        )
    siglip = tower == SIGLIP
    only(whole, "vision_feature_select_strategy", "full" if siglip else "default")
    layers = layers_read(whole, vision.count("num_hidden_layers", 512, default=12), -2)
    patch, side = square_tiles(vision)
    key = "image_token_id" if whole.has("image_token_id") else "image_token_index"
    activation = whole.text("projector_hidden_act", default="gelu")
    more = int(not siglip)
    return VisionConfig(
        "llava",
        siglip_config(vision, max(layers))[0] if siglip else _clip(vision, max(layers)),
        patch,
        text.count("hidden_size", MAX_WIDTH),
        token_id=whole.count(key, 1 << 24, default=32000),
        max_patches=side**2 + more,
        max_tokens=side**2,
        mean=CLIP_MEAN,
        std=CLIP_STD,
        positions=side**2 + more,
        one_size=True,
        projector_activation=activation_named(activation, "projector_hidden_act"),
        class_token=not siglip,
        norm_before=not siglip,
        side_by_side=layers if len(layers) > 1 else (),
    )


def _clip(vision: Fields, layers: int) -> EncoderSpec:
    return encoder_config(
        vision,
        eps=vision.positive("layer_norm_eps", default=1e-5),
        activation=vision.text("hidden_act", default="quick_gelu"),
        layers=layers,
    )


def projector(source: Source, config: VisionConfig) -> JoinedMLP:
    from sdk.models.vision.projectors import JoinedMLP

    return JoinedMLP(source, config, norm=False)


def mmproj_config(
    common: dict[str, Any], keys: Fields, text: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Files have the layers up to the last one that the text reads. Those of LLaVA-Next have sizes
    of larger pictures. llama.cpp's convert_hf_to_gguf.py writes none of LLaVA's files; its older
    script also writes towers of SigLIP, which have no class token: those of Granite Vision are
    read.

    :raises UnsupportedError: another one of SigLIP: what becomes of larger pictures is not in such
        a file.
    """
    siglip = "v.class_embd" not in keys.values[SHAPES]
    granite = text.get("model_type") == "granite" and "image_grid_pinpoints" in keys.values
    if siglip and not granite:
        raise UnsupportedError(
            "mmproj: expected the tower of CLIP, with a class token (v.class_embd), found one "
            "without, and not that of Granite Vision (LLaVA with SigLIP, such as LLaVA-OneVision): "
            "load the text alone (limit_mm_per_prompt={'image': 0}), or open the folder of the "
            "model's safetensors files"
        )
    vision = {**common, "model_type": SIGLIP if siglip else CLIP}
    whole: dict[str, Any] = {
        "model_type": "llava",
        "vision_feature_layer": keys.values.get("feature_layer", -1),
    }
    if siglip:  # the script knows no name for the activation of all towers of SigLIP
        vision["hidden_act"] = "gelu_pytorch_tanh"
        whole["vision_feature_select_strategy"] = "full"
    if sides := keys.values.get("image_grid_pinpoints"):
        pairs = list(zip(sides[::2], sides[1::2], strict=False))
        whole |= {"model_type": "llava_next", "image_grid_pinpoints": pairs}
        only(keys, "mm_patch_merge_type", "spatial_unpad")
    return vision, whole


def mmproj_processor(keys: Fields) -> dict[str, Any]:
    """As llama.cpp prepares an image, which pads it to a square, and as LLaVA-Next's processor
    does."""
    side = keys.count("image_size", MAX_SIDE)
    sizes = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    if keys.values.get("image_grid_pinpoints"):
        return {**sizes, "image_processor_type": "LlavaNextImageProcessor"}
    return {**sizes, "image_processor_type": "LlavaImageProcessor", "do_pad": True}


FAMILY = Family(
    ("llava",),
    LAYER,
    VisionNames(
        {**PREFIXES, "multi_modal_projector.": "projector."},
        LAYERS,
        {
            **WHOLE_NAMES,
            "class_token": "tower.embeddings.class_embedding",
            "norm_before": "tower.pre_layrnorm",
            "projector": "projector",
        },
        LAYER_NAMES,
    ),
    read,
    projector,
    mmproj=MmprojRules(
        ("mlp",),
        ("llama", "mistral", "qwen2", "granite"),
        ("<image>",),
        mmproj_config,
        lambda keys: {
            "projector.linear_1": "mm.0",
            "projector.linear_2": "mm.2",
            "projector.newline": "model.image_newline",
        },
        mmproj_processor,
        gelu="gelu",
        last="mm.2.weight",
    ),
    positions=learned,
)
