"""What configs of vision models say of images, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

from sdk.loaders.folders.hf_folder import complete_config
from sdk.models.configs.config import ModelConfig
from sdk.models.vision.family import FAMILIES, families, vision_of
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.models.tiny_vision import MODELS

DICTS: dict[str, dict[str, Any]] = {}


def config_of(name: str) -> dict[str, Any]:
    """The config of a tiny model as transformers writes it."""
    if name not in DICTS:
        config = transformers.CONFIG_MAPPING[name.partition("-")[0]](**MODELS[name])
        DICTS[name] = config.to_dict()
    return copy.deepcopy(DICTS[name])


#: Family, part of the config (empty: the whole), key, value -> error and message.
REFUSED: list[tuple[str, str, str, Any, type[Exception], str]] = [
    ("gemma3", "", "mm_tokens_per_image", 17, CheckpointError, "the square of a divisor of 8"),
    ("gemma3", "", "mm_tokens_per_image", 9, CheckpointError, "the square of a divisor of 8"),
    ("gemma3", "", "image_token_index", "x", CheckpointError, "image_token_index: expected an int"),
    ("gemma3", "vision_config", "image_size", 5, CheckpointError, "at least one patch of 7 pixels"),
    ("gemma3", "vision_config", "patch_size", [7, 8], CheckpointError, "one side of squares"),
    ("gemma3", "vision_config", "num_attention_heads", 5, CheckpointError, "a divisor of hidden_"),
    ("gemma3", "vision_config", "hidden_act", "mish", UnsupportedError, "hidden_act: expected one"),
    ("gemma3", "vision_config", "layer_norm_eps", 0, CheckpointError, "layer_norm_eps: expected"),
    (
        "gemma3",
        "image_processor",
        "image_mean",
        [0.5],
        CheckpointError,
        "image_mean: expected",
    ),
    (
        "gemma3",
        "image_processor",
        "image_std",
        [0, 1, 1],
        CheckpointError,
        "image_std: expected",
    ),
    (
        "gemma3",
        "image_processor",
        "rescale_factor",
        -1,
        CheckpointError,
        "rescale_factor: exp",
    ),
    ("idefics3", "", "scale_factor", 4, CheckpointError, "scale_factor: expected a divisor of 6"),
    (
        "qwen2_5_vl",
        "vision_config",
        "window_size",
        3,
        CheckpointError,
        "window_size: expe",
    ),
    (
        *("qwen2_5_vl", "vision_config", "fullatt_block_indexes", [-1]),
        *(CheckpointError, "fullatt_block_indexes: expected numbers of layers below 512"),
    ),
    (
        *("qwen3_vl", "vision_config", "deepstack_visual_indexes", [3]),
        *(CheckpointError, "deepstack_visual_indexes: expected numbers of layers below 3"),
    ),
    (
        *("qwen3_vl", "vision_config", "deepstack_visual_indexes", [2, 0]),
        *(CheckpointError, "deepstack_visual_indexes: expected numbers in ascending order"),
    ),
    (
        "qwen3_vl",
        "vision_config",
        "num_heads",
        4,
        CheckpointError,
        "heads of a multiple of 4",
    ),
    (
        "qwen3_vl",
        "vision_config",
        "out_hidden_size",
        72,
        CheckpointError,
        "hidden_size, 64, f",
    ),
    (
        "qwen2_5_vl",
        "vision_config",
        "out_hidden_size",
        72,
        CheckpointError,
        "hidden_size, 64, f",
    ),
    (
        "qwen3_vl",
        "image_processor",
        "max_pixels",
        0,
        CheckpointError,
        "max_pixels: expected",
    ),
    (
        *("qwen3_vl", "text_config", "rope_parameters"),
        {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4]},
        *(CheckpointError, "mrope_section: expected 3 numbers"),
    ),
    (
        *("qwen2_5_vl", "text_config", "rope_parameters"),
        {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
        *(CheckpointError, "mrope_section: expected a sum of 8 frequencies, found"),
    ),
    ("mistral3", "", "vision_feature_layer", [1, 2], UnsupportedError, "expected one layer, found"),
    ("mistral3", "", "vision_feature_layer", -4, CheckpointError, "expected a layer of 3, or -1"),
    ("mistral3", "", "vision_feature_layer", 0, CheckpointError, "expected a layer of 3, or -1"),
    ("mistral3", "", "projector_hidden_act", "mish", UnsupportedError, "projector_hidden_act: exp"),
    ("mistral3", "vision_config", "head_dim", 22, CheckpointError, "head_dim: expected a multiple"),
    (
        *("gemma4", "vision_config", "num_key_value_heads", 1),
        *(UnsupportedError, "num_key_value_heads: expected 3, found '1'"),
    ),
    ("gemma4", "vision_config", "attention_bias", True, UnsupportedError, "attention_bias: expec"),
    (
        "gemma4",
        "vision_config",
        "head_dim",
        22,
        CheckpointError,
        "head_dim: expected a multiple of",
    ),
    (
        *("gemma4", "vision_config", "rope_parameters", {"rope_type": "linear", "rope_theta": 9.0}),
        *(UnsupportedError, "rope_parameters: rope_type: expected 'axial', found 'linear'"),
    ),
    (
        *("gemma4", "vision_config", "position_embedding_size", 559),
        *(CheckpointError, "position_embedding_size: expected at least 560, found 559"),
    ),
    (
        "gemma4-e",
        "text_config",
        "pad_token_id",
        -1,
        CheckpointError,
        "pad_token_id: expected a tok",
    ),
    (
        *("qwen2_5_vl", "vision_config", "hidden_act", "quick_gelu"),
        *(
            UnsupportedError,
            "hidden_act: expected .* without a slope, found 'quick_gelu'",
        ),
    ),
    ("internvl", "", "downsample_ratio", 0.3, CheckpointError, "1 divided by a divisor of 8"),
    ("internvl", "", "vision_feature_select_strategy", "full", UnsupportedError, "expected 'defau"),
    ("internvl", "vision_config", "norm_type", "rms_norm", UnsupportedError, "expected 'layer_nor"),
    ("internvl", "vision_config", "use_qk_norm", True, UnsupportedError, "use_qk_norm: expected F"),
    ("internvl", "vision_config", "use_mean_pooling", False, UnsupportedError, "use_mean_pooling"),
    ("internvl", "vision_config", "use_mask_token", True, UnsupportedError, "use_mask_token"),
    (
        *("internvl", "vision_config", "use_absolute_position_embeddings", False),
        *(UnsupportedError, "use_absolute_position_embeddings: expected True, found 'False'"),
    ),
    ("lfm2_vl", "vision_config", "num_patches", 26, CheckpointError, "expected a square number"),
    ("llava", "", "vision_feature_select_strategy", "full", UnsupportedError, "expected 'default'"),
    ("llava_next", "", "image_grid_pinpoints", [[56, 57]], CheckpointError, "in multiples of 56"),
    ("llava_next", "", "image_grid_pinpoints", [], CheckpointError, "a list of heights and width"),
    ("llava_onevision", "", "vision_aspect_ratio", "pad", CheckpointError, "anyres_max_9 or the"),
    ("paligemma", "vision_config", "model_type", "clip", UnsupportedError, "expected 'siglip_visi"),
    (
        "paligemma",
        "",
        "image_token_index",
        96,
        CheckpointError,
        "image_token_index: expected a tok",
    ),
    ("llava", "vision_config", "model_type", "dinov2", UnsupportedError, "'pixtral', found 'dino"),
    ("llava_next", "vision_config", "model_type", "pixtral", UnsupportedError, "or 'pixtral', fou"),
    ("llava", "", "vision_feature_layer", [], CheckpointError, "expected a layer of 3, or -1"),
    ("llava", "", "vision_feature_layer", [1, 4], CheckpointError, "expected a layer of 3, or -1"),
    ("llava", "", "vision_feature_layer", [1, "2"], CheckpointError, "expected a layer of 3, or"),
    (
        *("llava-siglip", "", "vision_feature_select_strategy", "default", UnsupportedError),
        "expected 'full', found 'default'",
    ),
    (
        *("llava-pixtral", "", "vision_feature_select_strategy", "default", UnsupportedError),
        "expected 'full', found 'default'",
    ),
    ("llava-pixtral", "", "vision_feature_layer", [1, 2], UnsupportedError, "expected one layer"),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[0]}-{case[2]}-{case[3]}"[:60])
def test_what_a_tower_cannot_be_is_refused_by_name(case: tuple[Any, ...]) -> None:
    name, part, key, value, error, message = case
    config = config_of(name)
    (config.setdefault(part, {}) if part else config)[key] = value
    with pytest.raises(error, match=message):
        ModelConfig.from_dict(config)


def test_every_family_is_found_by_the_types_that_it_names() -> None:
    assert {name for own in families() for name in own.model_types} == {*FAMILIES}
    for name in MODELS:
        found = ModelConfig.from_dict(config_of(name)).vision
        assert found is not None and found.tower.num_layers in (2, 3) and found.hidden_size == 64
        ends = 0 if not found.pictures else 8 * 3  # of rows of tokens
        assert found.token_id == 90 and found.max_patches + ends >= found.max_tokens >= 1


def test_what_a_vision_config_leaves_out_has_the_default_of_its_class() -> None:
    config = config_of("smolvlm")
    for key, value in (("intermediate_size", 3072), ("num_hidden_layers", 12)):
        del config["vision_config"][key]
        found = ModelConfig.from_dict(complete_config(config, "config.json")).vision
        assert found is not None
        assert getattr(found.tower, key.replace("hidden_layers", "layers")) == value


@pytest.mark.parametrize("text", ["qwen3", "gemma3_text"])
def test_a_text_model_has_no_tower(text: str) -> None:
    assert vision_of({"model_type": text, "hidden_size": 64}) is None
    # nor one whose images are not supported
    config = {"model_type": "kosmos-2", "vision_config": {"hidden_size": 8}, "text_config": {}}
    assert vision_of(config) is None


def test_the_colors_are_those_of_the_processor() -> None:
    config = config_of("gemma3")
    plain = vision_of(config)
    assert plain is not None and (plain.scale, plain.mean) == (1 / 255, (0.5, 0.5, 0.5))
    config["image_processor"] = {"image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 4]}
    found = vision_of(config)
    assert found is not None and found.mean == (0.1, 0.2, 0.3) and found.std == (1.0, 2.0, 4.0)
    config["image_processor"] = {"do_rescale": False, "do_normalize": False}
    found = vision_of(config)
    assert found is not None
    assert (found.scale, found.mean, found.std) == (1.0, (0.0,) * 3, (1.0,) * 3)


#: The class of LFM2-VL needs torchvision, and transformers names none for mixtures of experts.
@pytest.mark.parametrize("name", sorted({*MODELS} - {"lfm2_vl", "qwen3_vl_moe"}))
def test_without_statistics_of_pixels_they_are_those_of_the_processors_class(name: str) -> None:
    found = ModelConfig.from_dict(config_of(name)).vision
    kind = IMAGE_PROCESSOR_MAPPING_NAMES[name.partition("-")[0]]["pil"]
    own = getattr(transformers, kind)
    mean, std = tuple(own.image_mean), tuple(own.image_std)
    if name.startswith("gemma4"):  # whose model makes numbers from -1 to 1 of those from 0 to 1
        assert (mean, std) == ((0.0,) * 3, (1.0,) * 3)
        mean = std = (0.5,) * 3
    assert found is not None
    assert (found.mean, found.std) == (mean, std)


def test_frequencies_turn_by_the_axes_of_transformers() -> None:
    """Plain sections one after the other; interleaved ones take turns as long as they last."""
    plain = ModelConfig.from_dict(config_of("qwen2_5_vl")).vision
    turns = ModelConfig.from_dict(config_of("qwen3_vl")).vision
    short = ModelConfig.from_dict(config_of("qwen3_5")).vision  # half of each head turns
    assert plain is not None and plain.axes == (0, 0, 0, 0, 1, 1, 2, 2)
    assert turns is not None and turns.axes is not None
    frequencies = np.zeros(8, np.int64)  # the slices of recomposition_frequencies
    for axis, section in ((1, 2), (2, 2)):
        frequencies[axis : 3 * section : 3] = axis
    assert turns.axes == tuple(frequencies.tolist())
    assert short is not None and short.axes == (0, 1, 2, 0)
    default = config_of("qwen3_5")
    del default["text_config"]["rope_parameters"]["mrope_section"]
    found = vision_of(default)
    assert found is not None and found.sections == (11, 11, 10)
