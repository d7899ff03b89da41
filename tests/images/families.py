"""Image processors of transformers beside ours: settings of each family, its pixels and its text.

The settings are those of published checkpoints, with smaller tiles where that keeps tests quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.images.processors import ImageProcessor, image_processor

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Family(NamedTuple):
    """``theirs``: module and class of transformers' image processor. ``keys``: its settings.
    ``text``: its text for the one image of the outputs, by transformers' Processor class."""

    config: dict[str, Any]
    theirs: tuple[str, str]
    keys: dict[str, Any]
    text: Callable[[Any, Any, Pixels], str] | None
    image_token: str
    #: Settings of the Processor class beside those of the image processor.
    processor: Mapping[str, Any] = MappingProxyType({})
    #: What the Processor class passes to the image processor.
    call: Mapping[str, Any] = MappingProxyType({})

    def ours(self) -> ImageProcessor:
        kind = self.theirs[1].removesuffix("Pil")
        keys = {"image_processor_type": kind, **self.keys}
        return image_processor(self.config, {**self.processor, "image_processor": keys})

    def made(self) -> Any:
        module = __import__(f"transformers.models.{self.theirs[0]}", fromlist=["x"])
        return getattr(module, self.theirs[1])(**self.keys)

    def outputs(self, theirs: Any, pixels: Pixels) -> Any:
        return theirs(pixels, input_data_format="channels_last", **self.call)


def replaced(module: str, name: str, **attributes: Any) -> Callable[[Any, Any, Pixels], str]:
    """The text of a Processor class, whose method is called with these attributes: most of the
    classes themselves need a tokenizer, some torchvision."""

    def text(theirs: Any, outputs: Any, pixels: Pixels) -> str:
        models = __import__(f"transformers.models.{module}", fromlist=["x"])
        cls = getattr(models, name)
        this = SimpleNamespace(image_processor=theirs, **attributes)
        for method in ("_get_number_of_features", "_get_unpadded_features"):
            if hasattr(cls, method):
                setattr(this, method, getattr(cls, method).__get__(this))
        if not name.startswith("MiniCPM"):
            text: str = cls.replace_image_token(this, outputs, 0)
            return text
        # Its class puts the number of an image before it in a second step.
        joined = 4 if theirs.downsample_mode == "4x" else 16
        return "<image_id>0</image_id>" + cls.replace_image_token(
            this, outputs, 0, image_token_divisor=joined
        )

    return text


def normalized(tile: Pixels, theirs: Any) -> Floats:
    """A tile as floats ``[3, height, width]``, as transformers computes them with numpy."""
    values = tile.transpose(2, 0, 1)
    floats = (values.astype(np.float64) * theirs.rescale_factor).astype(np.float32)
    if not theirs.do_normalize:
        return floats
    mean, std = (np.array(x, np.float32) for x in (theirs.image_mean, theirs.image_std))
    return ((floats.T - mean) / std).T


def their_tiles(theirs: Any, outputs: Any) -> list[Floats]:
    """``[3, height, width]`` of each tile, from what the image processor returns."""
    values = outputs["pixel_values"]
    if "image_grid_thw" in outputs:  # Qwen: merged patches, each doubled for two frames
        _, rows, columns = outputs["image_grid_thw"][0]
        patch, merge = theirs.patch_size, theirs.merge_size
        shape = (rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
        patches = values.reshape(shape)
        assert (patches[..., 0, :, :] == patches[..., 1, :, :]).all()
        tile = patches[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6)
        return [tile.reshape(3, rows * patch, columns * patch)]
    if "image_position_ids" in outputs:  # Gemma 4: patches, filled up
        positions = outputs["image_position_ids"][0]
        columns, rows = positions.max(0) + 1
        patch = theirs.patch_size
        tile = values[0][: rows * columns].reshape(rows, columns, patch, patch, 3)
        return [tile.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch)]
    if "target_sizes" in outputs:  # MiniCPM-V: patches of all tiles side by side
        tiles, at, patch = [], 0, theirs.patch_size
        for rows, columns in outputs["target_sizes"]:
            width = rows * columns * patch
            tile = values[0][..., at : at + width].reshape(3, patch, rows, columns, patch)
            tiles.append(tile.transpose(0, 2, 1, 3, 4).reshape(3, rows * patch, columns * patch))
            at += width
        return tiles
    if "spatial_shapes" in outputs:  # SigLIP 2: patches, filled up, whose colors are neighbours
        patch, found = theirs.patch_size, []
        for (rows, columns), own in zip(outputs["spatial_shapes"], values, strict=True):
            tile = own[: rows * columns].reshape(rows, columns, patch, patch, 3)
            tile = tile.transpose(4, 0, 2, 1, 3)
            found.append(tile.reshape(3, rows * patch, columns * patch))
        return found
    values = np.asarray(values)
    return list(values[0] if values.ndim == 5 else values)


def shown(layout: list[str | int], image_token: str) -> str:
    return "".join(part if isinstance(part, str) else image_token * part for part in layout)


def _clip(side: int, **keys: Any) -> dict[str, Any]:
    return {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, **keys}


def _tower(side: int | None, patch: int, **keys: Any) -> dict[str, Any]:
    return {"patch_size": patch, **({"image_size": side} if side else {}), **keys}


_GEMMA_SEQUENCE = "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"
_GEMMA = Family(
    {"model_type": "gemma3", "vision_config": _tower(112, 14), "mm_tokens_per_image": 16},
    ("gemma3", "Gemma3ImageProcessorPil"),
    {"size": {"height": 112, "width": 112}},
    replaced("gemma3", "Gemma3Processor", full_image_sequence=_GEMMA_SEQUENCE),
    "<image_soft_token>",
)
_PAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 64,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
_QWEN_TEXT = {"image_token": "<|image_pad|>"}
_IDEFICS_TEXT = {
    "image_token": "<image>",
    "image_seq_len": 4,
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>",
}
_MINICPM = Family(
    {"model_type": "minicpmv4_6", "vision_config": _tower(None, 14)},
    ("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil"),
    {"scale_resolution": 112},
    replaced(
        "minicpmv4_6",
        "MiniCPMV4_6Processor",
        image_token="<|image_pad|>",
        slice_mode=True,
        **{
            f"{name}_{place}_token": f"<{'/' * (place == 'end')}{name}>"
            for name in ("image", "slice")
            for place in ("start", "end")
        },
    ),
    "<|image_pad|>",
)
_SIZES = [[56 * rows, 56 * columns] for rows in range(1, 5) for columns in range(1, 5)]
_SIZES_OF_112 = [[112 * rows, 112 * columns] for rows in range(1, 4) for columns in range(1, 4)]

FAMILIES = {
    "gemma3": _GEMMA,
    "gemma3-pan-and-scan": _GEMMA._replace(keys={**_GEMMA.keys, **_PAN}),
    "paligemma": Family(
        {"model_type": "paligemma", "vision_config": _tower(112, 14)},
        ("siglip", "SiglipImageProcessorPil"),
        {"size": {"height": 112, "width": 112}},
        replaced("paligemma", "PaliGemmaProcessor", image_token="<image>", image_seq_length=64),
        "<image>",
        {"image_seq_length": 64},
    ),
    "qwen2-vl": Family(
        {"model_type": "qwen2_5_vl", "vision_config": _tower(None, 14, spatial_merge_size=2)},
        ("qwen2_vl", "Qwen2VLImageProcessorPil"),
        {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 60},
        replaced("qwen2_vl", "Qwen2VLProcessor", **_QWEN_TEXT),
        "<|image_pad|>",
    ),
    "qwen3-vl": Family(
        {"model_type": "qwen3_vl", "vision_config": _tower(None, 16, spatial_merge_size=2)},
        ("qwen2_vl", "Qwen2VLImageProcessorPil"),
        {
            "size": {"shortest_edge": 16384, "longest_edge": 262144},
            "patch_size": 16,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        replaced("qwen3_vl", "Qwen3VLProcessor", **_QWEN_TEXT),
        "<|image_pad|>",
    ),
    "idefics3": Family(
        {"model_type": "idefics3", "vision_config": _tower(56, 14), "scale_factor": 2},
        ("idefics3", "Idefics3ImageProcessorPil"),
        {"size": {"longest_edge": 224}, "max_image_size": {"longest_edge": 56}},
        replaced("idefics3", "Idefics3Processor", **_IDEFICS_TEXT),
        "<image>",
        {"image_seq_len": 4},
        {"return_row_col_info": True},
    ),
    "smolvlm": Family(
        {"model_type": "smolvlm", "vision_config": _tower(64, 16), "scale_factor": 2},
        ("smolvlm", "SmolVLMImageProcessorPil"),
        {"size": {"longest_edge": 201}, "max_image_size": {"longest_edge": 64}},
        replaced("smolvlm", "SmolVLMProcessor", **_IDEFICS_TEXT),
        "<image>",
        {"image_seq_len": 4},
        {"return_row_col_info": True},
    ),
    "smolvlm-whole": Family(
        {"model_type": "smolvlm", "vision_config": _tower(64, 16), "scale_factor": 2},
        ("smolvlm", "SmolVLMImageProcessorPil"),
        {
            "size": {"longest_edge": 128},
            "max_image_size": {"longest_edge": 64},
            "do_image_splitting": False,
        },
        replaced("smolvlm", "SmolVLMProcessor", **_IDEFICS_TEXT),
        "<image>",
        call={"return_row_col_info": True},
    ),
    "pixtral": Family(
        {"model_type": "mistral3", "vision_config": _tower(None, 14), "spatial_merge_size": 2},
        ("pixtral", "PixtralImageProcessorPil"),
        {"size": {"longest_edge": 200}, "patch_size": {"height": 14, "width": 14}},
        None,  # its class needs torchvision: test_torchvision.py
        "[IMG]",
        {"patch_size": 14, "spatial_merge_size": 2},
        {"patch_size": {"height": 28, "width": 28}},
    ),
    "minicpmv4.6": _MINICPM,
    "minicpmv4.6-4x": _MINICPM._replace(
        config={**_MINICPM.config, "downsample_mode": "4x"},
        keys={"scale_resolution": 112, "downsample_mode": "4x", "max_slice_nums": 4},
    ),
    "llava": Family(
        {"model_type": "llava", "vision_config": _tower(112, 14)},
        ("clip", "CLIPImageProcessorPil"),
        _clip(112),
        replaced(
            "llava",
            "LlavaProcessor",
            image_token="<image>",
            patch_size=14,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        ),
        "<image>",
    ),
    "clip": Family(
        {"model_type": "clip", "vision_config": _tower(112, 14)},
        ("clip", "CLIPImageProcessorPil"),
        _clip(112),
        None,  # an image is one vector, not a text
        "",
    ),
    "clip-numbers": Family(  # sizes as old files have them
        {"model_type": "clip", "vision_config": _tower(112, 16)},
        ("clip", "CLIPImageProcessorPil"),
        {"size": 112, "crop_size": 112},
        None,
        "",
    ),
    "siglip": Family(
        {"model_type": "siglip", "vision_config": _tower(112, 16)},
        ("siglip", "SiglipImageProcessorPil"),
        {"size": {"height": 112, "width": 112}},
        None,
        "",
    ),
    "siglip2-naflex": Family(
        {"model_type": "siglip2", "vision_config": _tower(None, 16)},
        ("siglip2", "Siglip2ImageProcessorPil"),
        {"patch_size": 16, "max_num_patches": 60},
        None,
        "",
    ),
    "llava-padded": Family(
        {"model_type": "llava", "vision_config": _tower(112, 14)},
        ("llava", "LlavaImageProcessorPil"),
        _clip(112, do_pad=True),
        replaced(
            "llava",
            "LlavaProcessor",
            image_token="<image>",
            patch_size=14,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        ),
        "<image>",
    ),
    "llava-next": Family(
        {"model_type": "llava_next", "vision_config": _tower(112, 14)},
        ("llava_next", "LlavaNextImageProcessorPil"),
        _clip(
            112,
            image_grid_pinpoints=[[112, 224], [224, 112], [224, 224], [336, 112], [112, 336]],
        ),
        replaced(
            "llava_next",
            "LlavaNextProcessor",
            image_token="<image>",
            patch_size=14,
            num_additional_image_tokens=1,
            vision_feature_select_strategy="default",
        ),
        "<image>",
    ),
    "llava-siglip": Family(
        {
            "model_type": "llava",
            "vision_config": _tower(112, 14, model_type="siglip_vision_model"),
            "vision_feature_select_strategy": "full",
        },
        ("siglip", "SiglipImageProcessorPil"),
        {"size": {"height": 112, "width": 112}},
        replaced(
            "llava",
            "LlavaProcessor",
            image_token="<image>",
            patch_size=14,
            num_additional_image_tokens=0,
            vision_feature_select_strategy="full",
        ),
        "<image>",
    ),
    "granite-vision": Family(
        {
            "model_type": "llava_next",
            "vision_config": _tower(112, 14, model_type="siglip_vision_model"),
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": _SIZES_OF_112,
        },
        ("llava_next", "LlavaNextImageProcessorPil"),
        {
            "size": {"height": 112, "width": 112},
            "crop_size": {"height": 112, "width": 112},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_grid_pinpoints": _SIZES_OF_112,
        },
        replaced(
            "llava_next",
            "LlavaNextProcessor",
            image_token="<image>",
            patch_size=14,
            num_additional_image_tokens=0,
            vision_feature_select_strategy="full",
        ),
        "<image>",
    ),
    "llava-onevision": Family(
        {
            "model_type": "llava_onevision",
            "vision_config": _tower(56, 14),
            "vision_aspect_ratio": "anyres_max_3",
        },
        ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
        {"size": {"height": 56, "width": 56}, "image_grid_pinpoints": _SIZES},
        replaced(
            "llava_onevision",
            "LlavaOnevisionProcessor",
            image_token="<image>",
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_3",
        ),
        "<image>",
    ),
    "internvl": Family(
        {"model_type": "internvl", "vision_config": _tower(56, 14), "downsample_ratio": 0.5},
        ("got_ocr2", "GotOcr2ImageProcessorPil"),
        {"size": {"height": 56, "width": 56}, "max_patches": 12},
        replaced(
            "internvl",
            "InternVLProcessor",
            image_token="<IMG_CONTEXT>",
            start_image_token="<img>",
            end_image_token="</img>",
            image_seq_length=4,
        ),
        "<IMG_CONTEXT>",
        {"image_seq_length": 4},
        {"crop_to_patches": True},
    ),
    "gemma4": Family(
        {"model_type": "gemma4", "vision_config": _tower(None, 16, pooling_kernel_size=3)},
        ("gemma4", "Gemma4ImageProcessorPil"),
        {"max_soft_tokens": 70},
        replaced(
            "gemma4",
            "Gemma4Processor",
            image_token="<|image|>",
            boi_token="<|image>",
            eoi_token="<image|>",
        ),
        "<|image|>",
    ),
}

#: Height and width: one pixel, thin ones, sides of tiles and patches, one more and one less, aspect
#: ratios at which the number of tiles changes.
SIZES = [
    *((1, 1), (1, 180), (180, 1), (3, 500), (500, 3), (2, 2), (17, 23), (14, 28), (28, 28)),
    *((27, 29), (55, 56), (56, 57), (57, 56), (111, 113), (112, 112), (112, 224), (113, 225)),
    *((63, 64), (64, 129), (128, 128), (100, 120), (100, 119), (120, 100), (200, 201), (201, 200)),
    *(
        (224, 223),
        (300, 200),
        (200, 300),
        (150, 640),
        (640, 150),
        (333, 500),
        (480, 640),
        (97, 389),
    ),
]


def image(height: int, width: int) -> Pixels:
    """Noise over a gradient: every filter shows."""
    random = np.random.default_rng(height * 7919 + width)
    noise = random.integers(0, 256, (height, width, 3))
    ramp = np.linspace(0, 255, height * width).reshape(height, width, 1)
    return ((noise + ramp) / 2).astype(np.uint8)
