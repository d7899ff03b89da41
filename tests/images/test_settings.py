"""Settings of image processors: read with the defaults of transformers' classes, or refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sdk.api.errors import RequestError
from sdk.images.processors import image_processor
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.images.families import FAMILIES, image

TOWER = {"vision_config": {"image_size": 112, "patch_size": 14}}
GEMMA = {"model_type": "gemma3"}
QWEN = {"model_type": "qwen2_5_vl"}
LFM = {"model_type": "lfm2_vl"}
ONEVISION = {"model_type": "llava_onevision"}
SQUARE = {"size": {"height": 112, "width": 112}}
NEXT = {"size": {"shortest_edge": 336}, "crop_size": 336}


@pytest.mark.parametrize(
    ("config", "keys", "said"),
    [
        ({"model_type": "llama"}, {}, "model_type 'llama' has no image processor here"),
        (GEMMA, {"image_processor_type": "ViTImageProcessor"}, "='ViTImageProcessor'"),
        (GEMMA, {"do_resize": False}, "do_resize=False"),
        (GEMMA, {"do_thumbnail": True}, "do_thumbnail=True"),
        (GEMMA, {"size": {"height": 112, "width": 224}}, "expected equal sides"),
        (QWEN, {"do_center_crop": True}, "do_center_crop=True"),
        ({"model_type": "mistral3"}, {"do_center_crop": True}, "do_center_crop=True"),
        ({"model_type": "mistral3"}, {"size": {"shortest_edge": 9}}, "expected longest_edge, or"),
        ({"model_type": "smolvlm"}, {"size": {"height": 9, "width": 9}}, "expected longest_edge"),
        (
            {"model_type": "llava"},
            {"do_center_crop": False, "size": {"shortest_edge": 224}},
            "without do_center_crop",
        ),
        ({"model_type": "llava_next"}, {"crop_size": 336}, "crop_size=336"),
        (ONEVISION, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio='pad'"),
        (
            {"model_type": "llava", "vision_feature_select_strategy": "full"},
            {},
            "vision_feature_select_strategy='full', which is not supported, expected 'default'",
        ),
        (
            {"model_type": "llava_next", "vision_config": {"model_type": "siglip_vision_model"}},
            NEXT,
            "vision_feature_select_strategy='default', which is not supported, expected 'full'",
        ),
        (LFM, {"use_image_special_tokens": False}, "use_image_special_tokens=False"),
    ],
)
def test_what_is_not_supported_is_named(
    config: dict[str, Any], keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedError) as error:
        image_processor(config, keys)
    assert said in str(error.value)
    assert "load it for text only" in str(error.value)


@pytest.mark.parametrize(
    ("config", "keys", "said"),
    [
        (GEMMA, {"resample": 9}, "resample=9, expected one of Pillow's filters"),
        (GEMMA, {"resample": "bicubic"}, "resample='bicubic'"),
        (GEMMA, {"size": {"height": -1, "width": 3}}, "size.height=-1"),
        (GEMMA, {"size": {"depth": 3}}, "size={'depth': 3}"),
        (GEMMA, {"size": []}, "size=[]"),
        (GEMMA, {"do_pan_and_scan": 1}, "do_pan_and_scan=1, expected true or false"),
        (
            GEMMA,
            {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 0},
            "pan_and_scan_max_num_crops=0, expected a whole number above 0",
        ),
        (
            GEMMA,
            {"do_pan_and_scan": True, "pan_and_scan_min_ratio_to_activate": "a"},
            "='a', expected a number above 0",
        ),
        ({**GEMMA, "mm_tokens_per_image": 200}, {}, "expected a square number"),
        ({"model_type": "paligemma", **TOWER}, {"size": 224}, "expected the tower's vision_config"),
        (
            {"model_type": "paligemma", **TOWER},
            {**SQUARE, "image_seq_length": 256},
            "image_seq_length=256, expected 64",
        ),
        (
            {**QWEN, "vision_config": {"patch_size": 16}},
            {"patch_size": 14},
            "expected the tower's, 16",
        ),
        (QWEN, {"min_pixels": 900, "max_pixels": 800}, "expected shortest_edge <= longest_edge"),
        (QWEN, {"min_pixels": 1, "max_pixels": 28 * 28 - 1}, "at least 784 pixels"),
        (QWEN, {"size": {"height": 28, "width": 28}}, "expected shortest_edge <= longest_edge"),
        (
            {"model_type": "smolvlm", "vision_config": {"patch_size": 16}},
            {"max_image_size": {"longest_edge": 48}},
            "expected a multiple of 16 x 2",
        ),
        (
            {"model_type": "smolvlm", "vision_config": {"patch_size": 14}},
            {"image_seq_len": 64},
            "image_seq_len=64, expected 169",
        ),
        ({"model_type": "mistral3"}, {"image_token": 3}, "image_token=3, expected a text"),
        (
            {"model_type": "llava_next", "image_grid_pinpoints": [[336, 336]]},
            {**NEXT, "image_grid_pinpoints": [[336, 672]]},
            "expected the model's, [[336, 336]]",
        ),
        *(
            ({"model_type": "llava_next"}, {**NEXT, "image_grid_pinpoints": sizes}, said)
            for sizes, said in (
                ([], "expected at least one size"),
                ([[336]], "expected pairs of height and width"),
                ([[336, 500]], "expected multiples of 336"),
            )
        ),
        ({"model_type": "internvl"}, {"min_patches": 13}, "min_patches=13, expected at most"),
        ({"model_type": "internvl", "downsample_ratio": 0.3}, {}, "downsample_ratio=0.3"),
        (
            {"model_type": "internvl", **TOWER},
            {"image_seq_length": 9},
            "image_seq_length=9, expected 16",
        ),
        (LFM, {"min_tiles": 1}, "min_tiles, max_tiles, tile_size=(1, 10, 512)"),
        (LFM, {"tile_size": 500}, "tile_size a multiple of 32"),
        (LFM, {"min_image_tokens": 300}, "min_image_tokens=300, expected <= 256"),
        (
            {**LFM, "vision_config": {"patch_size": 14}},
            {"encoder_patch_size": 16},
            "expected the tower's, 14",
        ),
        (
            {"model_type": "gemma4", "vision_config": {"pooling_kernel_size": 2}},
            {"pooling_kernel_size": 3},
            "expected the tower's, 2",
        ),
        ({"model_type": "gemma4"}, {"max_soft_tokens": 100}, "one of 70, 140, 280, 560, 1120"),
    ],
)
def test_what_is_invalid_is_named(config: dict[str, Any], keys: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError) as error:
        image_processor(config, keys)
    assert not isinstance(error.value, UnsupportedError)
    assert said in str(error.value)
    assert "preprocessor_config.json" in str(error.value)


def test_keys_that_are_null_or_missing_have_the_defaults_of_the_class() -> None:
    plain = image_processor({"model_type": "qwen2_vl"}, {})
    null = image_processor(
        {"model_type": "qwen2_vl"}, {"min_pixels": None, "size": None, "resample": None}
    )
    assert plain.most_tokens == null.most_tokens == 1280
    # transformers 4, transformers 5, and fast classes.
    for keys in (
        {"image_processor_type": "Qwen2VLImageProcessorFast"},
        {"image_processor": {"image_processor_type": "Qwen2VLImageProcessor"}, "size": None},
        {"feature_extractor_type": "Qwen2VLFeatureExtractor"},
    ):
        assert image_processor({"model_type": "qwen3_vl"}, keys).most_tokens == 1280


def test_the_config_of_a_checkpoint_keeps_the_keys_of_the_whole_model_apart() -> None:
    """Loaders give the text part, with the others beside it."""
    config = {
        "model_type": "gemma3_text",
        "multimodal_config": {"model_type": "gemma3", "mm_tokens_per_image": 16},
        "vision_config": {"image_size": 112},
    }
    assert image_processor(config, SQUARE).most_tokens == 16
    with pytest.raises(CheckpointError, match="image_size, 112"):
        image_processor(config, {"size": 896})


def test_tiles_have_the_size_that_the_tower_reads_if_the_checkpoint_does_not_say_it() -> None:
    pixels = image(30, 20)
    for model_type in ("gemma3", "paligemma", "llava", "llava_next", "internvl", "smolvlm"):
        config = {"model_type": model_type, **TOWER}
        sizes = [] if model_type != "llava_next" else [[112, 112]]
        processor = image_processor(config, {"image_grid_pinpoints": sizes or None})
        assert {tile.shape for tile in processor.read(pixels).tiles} == {(112, 112, 3)}
    with pytest.raises(CheckpointError, match="image_size='big', expected a whole number"):
        image_processor({"model_type": "gemma3", "vision_config": {"image_size": "big"}}, {})


def test_the_digest_is_of_pixels_and_sizes() -> None:
    ours = FAMILIES["llava-next"].ours()
    pixels = image(120, 80)
    read = ours.read(pixels)
    assert len(read.digest) == 32
    assert ours.read(pixels.copy()).digest == read.digest
    assert read.size == (120, 80)
    other = pixels.copy()
    other[0, 0] += 128
    assert ours.read(other).digest != read.digest
    # The same black tiles; the tokens of the border are others.
    black = [ours.read(np.zeros((*size, 3), np.uint8)) for size in ((100, 200), (100, 198))]
    assert all((a == b).all() for a, b in zip(*(read.tiles for read in black), strict=True))
    assert black[0].digest != black[1].digest


@pytest.mark.parametrize("size", [(1, 201), (201, 1)])
def test_qwen_refuses_what_transformers_refuses(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="more than 200 times longer than wide"):
        FAMILIES["qwen2-vl"].ours().num_tokens(*size)


def test_images_that_are_too_narrow_are_refused_by_name() -> None:
    narrow = np.zeros((1, 60000, 3), np.uint8)
    with pytest.raises(RequestError, match="would be resized to 112 x 6,720,000: crop it"):
        FAMILIES["llava"].ours().read(narrow)
    with pytest.raises(RequestError, match="would be padded to 60,000 x 60,000"):
        FAMILIES["llava-padded"].ours().read(narrow)
    with pytest.raises(RequestError, match="would be resized to 0 x 200"):
        FAMILIES["pixtral"].ours().read(narrow)
    # transformers goes beyond the budget of tokens here.
    whole = image_processor(LFM, {"do_image_splitting": False})
    with pytest.raises(RequestError, match="would become 358 tokens of at most 256"):
        whole.num_tokens(1, 2000)
    with pytest.raises(RequestError, match="0 x 5 pixels, expected at least 1 x 1"):
        whole.num_tokens(0, 5)


def test_pixels_of_another_form_are_refused() -> None:
    ours = FAMILIES["gemma3"].ours()
    for wrong in (
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
    ):
        with pytest.raises(RequestError, match=r"expected uint8 \[height, width, 3\]"):
            ours.read(wrong)
