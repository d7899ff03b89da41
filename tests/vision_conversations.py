"""Conversations about images of more families, as transformers' processors hand them to its models.

The classes of these processors need packages that tests do without, so their parts are put
together here: the pixels of the image processor, and the text of the class for one image, in the
place of the image token. Images of LFM2-VL and the text of Pixtral are ours, which
tests/images/test_torchvision.py compares with transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from sdk.images.processors import image_processor
from tests.images.families import replaced
from tests.vision_prompts import QWEN, Family, reference_tokenizer, turns

Pixels = NDArray[np.uint8]


class Conversations(NamedTuple):
    """``text(image processor, its output, pixels)``: what replaces an image token. ``inputs``: the
    arguments of the model, from the outputs for all images. ``call``: arguments of the image
    processor. ``model``: of the tiny model, beside those of tests/models/tiny_vision.py. ``name``:
    what it is called there, if not after its type."""

    family: Family
    text: Callable[[Any, Any, Pixels], str]
    inputs: Callable[[Sequence[Any], Sequence[Pixels]], dict[str, Tensor]]
    call: Mapping[str, Any] = MappingProxyType({})
    model: Mapping[str, Any] = MappingProxyType({})
    name: str = ""

    @property
    def tiny(self) -> str:
        """The name in tests/models/tiny_vision.py."""
        return self.name or self.family.model_type


def _stacked(outputs: Sequence[Any], pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    """Tiles of all images one after the other."""
    return {
        "pixel_values": torch.cat([torch.tensor(np.asarray(o["pixel_values"])) for o in outputs])
    }


def _of_idefics(outputs: Sequence[Any], pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    tiles = torch.cat([torch.tensor(np.asarray(o["pixel_values"])) for o in outputs], dim=1)
    return {"pixel_values": tiles}


def _of_qwen(outputs: Sequence[Any], pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    names = ("pixel_values", "image_grid_thw")
    return {n: torch.cat([torch.tensor(np.asarray(o[n])) for o in outputs]) for n in names}


def _of_anyres(outputs: Sequence[Any], pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    tiles = [torch.tensor(np.asarray(o["pixel_values"]))[0] for o in outputs]
    most = max(map(len, tiles))
    padded = [torch.cat([one, one.new_zeros(most - len(one), *one.shape[1:])]) for one in tiles]
    sizes = [picture.shape[:2] for picture in pictures]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)}


def _of_pixtral(outputs: Sequence[Any], pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    tiles = [torch.tensor(np.asarray(o["pixel_values"]))[0] for o in outputs]
    sizes = [tuple(one.shape[1:]) for one in tiles]
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    found = torch.zeros(len(tiles), 3, height, width)
    for number, one in enumerate(tiles):
        found[number, :, : one.shape[1], : one.shape[2]] = one
    return {"pixel_values": found, "image_sizes": torch.tensor(sizes)}


def _pixtral_text(side: int) -> Callable[[Any, Any, Pixels], str]:
    """``side``: pixels of a token's side."""

    def text(theirs: Any, outputs: Any, pixels: Pixels) -> str:
        height, width = np.asarray(outputs["pixel_values"]).shape[-2:]
        row = "[IMG]" * (width // side)
        return "[IMG_BREAK]".join([row] * (height // side)) + "[IMG_END]"

    return text


def _lfm2_tiles(pixels: Pixels) -> Any:
    return image_processor(LFM2.family.values, LFM2.family.size).read(pixels)


def _lfm2_text(theirs: Any, outputs: Any, pixels: Pixels) -> str:
    ours = image_processor(LFM2.family.values, LFM2.family.size)
    parts = ours.layout(ours.read(pixels))
    return "".join(one if isinstance(one, str) else "<image>" * one for one in parts)


def _of_lfm2(outputs: Sequence[Any], pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    side, rows, shapes = 7, [], []
    for tile in (tile for picture in pictures for tile in _lfm2_tiles(picture).tiles):
        pixels = (torch.from_numpy(tile.astype(np.float32)) / 255 - 0.5) / 0.5
        down, across = tile.shape[0] // side, tile.shape[1] // side
        parts = pixels.view(down, side, across, side, 3).permute(0, 2, 1, 3, 4)
        rows.append(parts.reshape(down * across, -1))
        shapes.append((down, across))
    most = max(map(len, rows))
    masks = torch.zeros(len(rows), most, dtype=torch.int32)
    values = torch.zeros(len(rows), most, rows[0].shape[1])
    for number, one in enumerate(rows):
        masks[number, : len(one)] = 1
        values[number, : len(one)] = one
    shape = torch.tensor(shapes)
    return {"pixel_values": values, "spatial_shapes": shape, "pixel_attention_mask": masks}


_PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
_BASE = Family(
    "",
    ("<s>", "</s>", "<image>"),
    {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"},
    "<image>",
    turns("{{ m.role.upper() }}: ", "<image>\n", " ", "ASSISTANT:"),
    {},
    "",
    {},
)
_IDEFICS_TEXT = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_tag": "<global-img>",
    "global_image_token": "<global-img>",
}
_IDEFICS = _BASE._replace(
    specials=(*_BASE.specials, "<fake_token_around_image>", "<global-img>", *_PLACES),
    template=turns("<s>{{ m.role }}:", "<image>", "</s>\n", "assistant:"),
)
SMOLVLM = Conversations(
    _IDEFICS._replace(
        model_type="smolvlm",
        config={"scale_factor": 2, "vision_config": {"image_size": 56, "patch_size": 7}},
        kind="SmolVLMImageProcessor",
        size={"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
    ),
    replaced("smolvlm", "SmolVLMProcessor", image_seq_len=16, **_IDEFICS_TEXT),
    _of_idefics,
    {"return_row_col_info": True},
)
IDEFICS3 = Conversations(
    _IDEFICS._replace(
        model_type="idefics3",
        config={"scale_factor": 3, "vision_config": {"image_size": 42, "patch_size": 7}},
        kind="Idefics3ImageProcessor",
        size={"size": {"longest_edge": 168}, "max_image_size": {"longest_edge": 42}},
    ),
    replaced("idefics3", "Idefics3Processor", image_seq_len=4, **_IDEFICS_TEXT),
    _of_idefics,
    {"return_row_col_info": True},
)
MISTRAL3 = Conversations(
    _BASE._replace(
        model_type="mistral3",
        specials=("<s>", "</s>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        roles={**_BASE.roles, "image_token": "[IMG]"},
        image_token="[IMG]",
        template=turns("[{{ m.role }}]", "[IMG]", "[/{{ m.role }}]", ""),
        config={"spatial_merge_size": 2, "vision_config": {"patch_size": 4}},
        kind="PixtralImageProcessor",
        size={"size": {"longest_edge": 64}, "patch_size": 4},
    ),
    _pixtral_text(8),
    _of_pixtral,
    {"patch_size": 8},
)
PIXTRAL_12B = Conversations(
    MISTRAL3.family._replace(
        model_type="llava",
        config={
            "vision_feature_select_strategy": "full",
            "vision_config": {"model_type": "pixtral", "patch_size": 4},
        },
    ),
    _pixtral_text(4),
    _of_pixtral,
    {"patch_size": 4},
    name="llava-pixtral",
)
LFM2 = Conversations(
    _BASE._replace(
        model_type="lfm2_vl",
        specials=(
            *(*_BASE.specials, "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3) for column in (1, 2, 3)),
        ),
        template=turns("<s>{{ m.role }}\n", "<image>", "</s>\n", "assistant\n"),
        config={"downsample_factor": 2, "vision_config": {"patch_size": 7}},
        kind="Lfm2VlImageProcessor",
        size={
            "tile_size": 56,
            "encoder_patch_size": 7,
            "downsample_factor": 2,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "max_tiles": 4,
        },
    ),
    _lfm2_text,
    _of_lfm2,
)
_CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
_PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56]]
LLAVA_NEXT = Conversations(
    _BASE._replace(
        model_type="llava_next",
        config={
            "vision_config": {
                "model_type": "clip_vision_model",
                "image_size": 56,
                "patch_size": 7,
            }
        },
        kind="LlavaNextImageProcessor",
        size={**_CLIP, "image_grid_pinpoints": _PINPOINTS},
    ),
    replaced(
        "llava_next",
        "LlavaNextProcessor",
        image_token="<image>",
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    ),
    _of_anyres,
)
GRANITE_VISION = Conversations(
    _BASE._replace(
        model_type="llava_next",
        config={
            "vision_feature_select_strategy": "full",
            "vision_config": {
                "model_type": "siglip_vision_model",
                "image_size": 56,
                "patch_size": 7,
            },
        },
        kind="LlavaNextImageProcessor",
        size={
            "size": {"height": 56, "width": 56},
            "crop_size": {"height": 56, "width": 56},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "image_grid_pinpoints": _PINPOINTS,
        },
    ),
    replaced(
        "llava_next",
        "LlavaNextProcessor",
        image_token="<image>",
        patch_size=7,
        num_additional_image_tokens=0,
        vision_feature_select_strategy="full",
    ),
    _of_anyres,
    name="llava_next-siglip",
)
_MORE_PINPOINTS = [*_PINPOINTS, [168, 168]]
ONEVISION = Conversations(
    _BASE._replace(
        model_type="llava_onevision",
        config={
            "vision_aspect_ratio": "anyres_max_4",
            "vision_config": {
                "model_type": "siglip_vision_model",
                "image_size": 56,
                "patch_size": 7,
            },
        },
        kind="LlavaOnevisionImageProcessor",
        size={"size": {"height": 56, "width": 56}, "image_grid_pinpoints": _MORE_PINPOINTS},
    ),
    replaced(
        "llava_onevision",
        "LlavaOnevisionProcessor",
        image_token="<image>",
        num_image_tokens=64,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    ),
    _of_anyres,
)
INTERNVL = Conversations(
    _BASE._replace(
        model_type="internvl",
        specials=("<s>", "</s>", "<img>", "</img>", "<IMG_CONTEXT>"),
        roles={**_BASE.roles, "image_token": "<IMG_CONTEXT>"},
        image_token="<IMG_CONTEXT>",
        template=turns("<s>{{ m.role }}\n", "<IMG_CONTEXT>\n", "</s>\n", "assistant\n"),
        config={
            "downsample_ratio": 0.5,
            "vision_config": {"image_size": 56, "patch_size": 7},
        },
        kind="GotOcr2ImageProcessor",
        size={"size": {"height": 56, "width": 56}, "max_patches": 4, "crop_to_patches": True},
    ),
    replaced(
        "internvl",
        "InternVLProcessor",
        image_token="<IMG_CONTEXT>",
        start_image_token="<img>",
        end_image_token="</img>",
        image_seq_length=16,
    ),
    _stacked,
)
_MARKS = {
    f"{name}_{place}_token": f"<{'/' * (place == 'end')}{name}>"
    for name in ("image", "slice", "image_id")
    for place in ("start", "end")
}


def _of_minicpm(outputs: Sequence[Any], pictures: Sequence[Pixels]) -> dict[str, Tensor]:
    pixels = torch.cat([torch.tensor(np.asarray(o["pixel_values"])) for o in outputs], dim=3)
    sizes = torch.cat([torch.tensor(np.asarray(o["target_sizes"])) for o in outputs])
    return {"pixel_values": pixels, "target_sizes": sizes}


def _minicpm_text(theirs: Any, outputs: Any, pixels: Pixels) -> str:
    """Without the number of the image, which :func:`inputs_of` knows."""
    from transformers.models.minicpmv4_6 import MiniCPMV4_6Processor

    this = SimpleNamespace(image_token="<|image_pad|>", slice_mode=True, **_MARKS)
    text: str = MiniCPMV4_6Processor.replace_image_token(this, outputs, 0, image_token_divisor=16)
    return text


MINICPM = Conversations(
    QWEN._replace(
        model_type="minicpmv4_6",
        specials=("<|im_start|>", "<|im_end|>", "<|image_pad|>", *_MARKS.values()),
        template=turns(
            "<|im_start|>{{ m.role }}\n", "<|image_pad|>", "<|im_end|>\n", "assistant\n"
        ),
        config={"vision_config": {"patch_size": 7}},
        kind="MiniCPMV4_6ImageProcessor",
        size={"patch_size": 7, "scale_resolution": 56},
    ),
    _minicpm_text,
    _of_minicpm,
)
_QWEN = Conversations(
    QWEN._replace(
        config={"vision_config": {"patch_size": 4, "spatial_merge_size": 2}},
        kind="Qwen2VLImageProcessor",
        size={
            "patch_size": 4,
            "size": {"shortest_edge": 64, "longest_edge": 8 * 8 * 24},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    ),
    replaced("qwen3_vl", "Qwen3VLProcessor", image_token="<|image_pad|>"),
    _of_qwen,
)


def _qwen(model_type: str) -> Conversations:
    return _QWEN._replace(family=_QWEN.family._replace(model_type=model_type))


ALL: Mapping[str, Conversations] = {
    one.tiny: one
    for one in (
        *(SMOLVLM, IDEFICS3, MISTRAL3, LFM2, LLAVA_NEXT, ONEVISION, INTERNVL),
        *(PIXTRAL_12B, GRANITE_VISION),
        *(_qwen("qwen3_vl"), _qwen("qwen3_vl_moe"), _qwen("qwen3_5"), MINICPM),
    )
}


def inputs_of(
    one: Conversations, messages: Sequence[Mapping[str, Any]], pictures: Sequence[Pixels]
) -> dict[str, Any]:
    """The arguments of transformers' model for a conversation. Parts are ``{"type": "image"}``."""
    family = one.family
    tokenizer = reference_tokenizer(family)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    theirs, outputs = None, [None] * len(pictures)
    if hasattr(transformers, f"{family.kind}Pil"):
        theirs = getattr(transformers, f"{family.kind}Pil")(**family.size)
        outputs = [theirs(p, input_data_format="channels_last", **one.call) for p in pictures]
    pieces = text.split(family.image_token)
    texts = [one.text(theirs, o, p) for o, p in zip(outputs, pictures, strict=True)]
    if family.model_type == "minicpmv4_6":
        texts = [f"<image_id>{number}</image_id>{own}" for number, own in enumerate(texts)]
    text = "".join(map("".join, zip(pieces, (*texts, ""), strict=True)))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if pictures:
        found.update(one.inputs(outputs, pictures))
    if family.model_type.startswith("qwen"):
        token = tokenizer.convert_tokens_to_ids(family.image_token)
        found["mm_token_type_ids"] = (ids == token).int()
    return found
