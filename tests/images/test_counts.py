"""With the settings of published checkpoints, numbers of tokens are those that transformers'
functions compute without pixels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sdk.api.errors import RequestError
from sdk.images.processors import image_processor

ONEVISION_SIZES = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
NEXT_SIZES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def sizes(count: int = 400) -> Iterator[tuple[int, int]]:
    """Of screens, photos and scans, and drawn: any shape up to 8192 pixels a side, often round."""
    yield from ((1, 1), (1, 200), (200, 1), (1080, 1920), (4000, 3000), (3508, 2480), (8192, 8192))
    draw = random.Random(45)
    for _ in range(count):
        step = draw.choice((1, 1, 14, 16, 28, 32, 56, 336, 384, 448, 512))
        yield (
            step * draw.randint(1, max(1, 8192 // step)),
            step * draw.randint(1, max(1, int(draw.choice((8192, 400)) // step))),
        )


def qwen(patch: int, low: int, high: int) -> Callable[[int, int], int]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    def tokens(height: int, width: int) -> int:
        rows, columns = smart_resize(height, width, 2 * patch, low, high)
        return rows * columns // (2 * patch) ** 2

    return tokens


def gemma4(height: int, width: int) -> int:
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    rows, columns = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
    return int(rows * columns // 48**2)


def minicpm(height: int, width: int) -> int:
    """An image with a fifth more tokens than square slices have is refused."""
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
        MiniCPMV4_6ImageProcessorPil,
    )

    theirs = MiniCPMV4_6ImageProcessorPil()
    how = {"scale_resolution": 448, "patch_size": 14, "downsample_mode": "16x"}
    grid = theirs.get_sliced_grid((height, width), 9, 448)
    sizes = [theirs.find_best_resize((height, width), allow_upscale=grid is None, **how)]
    if grid is not None:
        sizes.append(theirs.get_refine_size((height, width), grid, allow_upscale=True, **how))
    tokens = sum(rows * columns for rows, columns in sizes) // 56**2
    return tokens if tokens <= 768 else 0


def internvl(height: int, width: int) -> int:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
    tiles = rows * columns
    return 256 * (tiles + 1 if tiles > 1 else 1)


def pixtral(height: int, width: int) -> int:
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    pixels = np.broadcast_to(np.uint8(0), (3, height, width))
    rows, columns = get_resize_output_image_size(pixels, 1540, 28, "channels_first")
    return int(rows * columns // 28**2)


def features(module: str, name: str, sizes: list[list[int]], side: int, **attributes: Any) -> Any:
    """The tokens that a Processor class of LLaVA counts."""
    models = __import__(f"transformers.models.{module}", fromlist=["x"])
    cls = getattr(models, name)
    processor = SimpleNamespace(image_grid_pinpoints=sizes)
    this = SimpleNamespace(image_processor=processor, **attributes)
    this._get_unpadded_features = cls._get_unpadded_features.__get__(this)
    return lambda height, width: cls._get_number_of_features(this, height, width, side, side)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[int, int], int]]] = {
    "Qwen2.5-VL": (
        {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
        {"min_pixels": 3136, "max_pixels": 12845056},
        qwen(14, 3136, 12845056),
    ),
    "Qwen3-VL": (
        {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}},
        {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16},
        qwen(16, 65536, 16777216),
    ),
    "Gemma 4": (
        {"model_type": "gemma4", "vision_config": {"patch_size": 16, "pooling_kernel_size": 3}},
        {},
        gemma4,
    ),
    "MiniCPM-V 4.6": (
        {"model_type": "minicpmv4_6", "vision_config": {"patch_size": 14, "image_size": 980}},
        {"scale_resolution": 448, "max_slice_nums": 9, "patch_size": 14},
        minicpm,
    ),
    "InternVL 3": (
        {
            "model_type": "internvl",
            "vision_config": {"patch_size": [14, 14], "image_size": [448, 448]},
        },
        {"size": {"height": 448, "width": 448}, "crop_to_patches": False, "image_seq_length": 256},
        internvl,
    ),
    "Mistral Small 3.1": (
        {
            "model_type": "mistral3",
            "vision_config": {"patch_size": 14, "image_size": 1540},
            "spatial_merge_size": 2,
        },
        {"size": {"longest_edge": 1540}, "patch_size": {"height": 14, "width": 14}},
        pixtral,
    ),
    "LLaVA-Next": (
        {"model_type": "llava_next", "vision_config": {"patch_size": 14, "image_size": 336}},
        {
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "image_grid_pinpoints": NEXT_SIZES,
        },
        features(
            "llava_next",
            "LlavaNextProcessor",
            NEXT_SIZES,
            336,
            patch_size=14,
            num_additional_image_tokens=0,
        ),
    ),
    "LLaVA-OneVision": (
        {
            "model_type": "llava_onevision",
            "vision_config": {"patch_size": 14, "image_size": 384},
            "image_grid_pinpoints": ONEVISION_SIZES,
        },
        {"size": {"height": 384, "width": 384}},
        features(
            "llava_onevision",
            "LlavaOnevisionProcessor",
            ONEVISION_SIZES,
            384,
            num_image_tokens=729,
            vision_aspect_ratio="anyres_max_9",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_tokens_are_those_of_transformers(name: str) -> None:
    config, keys, theirs = CASES[name]
    ours = image_processor(config, keys)
    most = 0
    for height, width in sizes():
        try:
            expected = theirs(height, width)
        except ValueError:  # the aspect ratios that Qwen refuses
            expected = 0
        try:
            tokens = ours.num_tokens(height, width)
        except RequestError:
            tokens = 0
        assert tokens == expected, (height, width)
        most = max(most, tokens)
    assert 0.9 * ours.most_tokens <= most <= ours.most_tokens


@pytest.mark.parametrize(
    ("config", "keys", "most"),
    [
        ({"model_type": "gemma3", "vision_config": {"image_size": 896}}, {}, 256),
        ({"model_type": "paligemma", "vision_config": {"patch_size": 14}}, {}, 256),
        (
            {"model_type": "smolvlm", "vision_config": {"patch_size": 16}, "scale_factor": 4},
            {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
            17 * 64,
        ),
        (
            {"model_type": "idefics3", "vision_config": {"patch_size": 14}},
            {"image_seq_len": 169},
            17 * 169,
        ),
        ({"model_type": "llava"}, {"size": 336, "crop_size": 336}, 576),
        ({"model_type": "lfm2_vl", "vision_config": {"patch_size": 16}}, {}, 11 * 256),
    ],
    ids=["gemma3", "paligemma", "smolvlm", "idefics3", "llava", "lfm2-vl"],
)
def test_the_most_tokens_of_published_checkpoints(
    config: dict[str, Any], keys: dict[str, Any], most: int
) -> None:
    processor = image_processor(config, keys)
    assert processor.most_tokens == most
    assert 0.99 * most <= max(processor.num_tokens(*size) for size in sizes(100)) <= most
