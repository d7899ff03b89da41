"""Image processors: one module for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sdk.images.processors.anyres import AnyResolutionProcessor, OneVisionProcessor
from sdk.images.processors.base import ImageProcessor
from sdk.images.processors.canvas import InternProcessor, LfmProcessor
from sdk.images.processors.gemma4 import Gemma4Processor
from sdk.images.processors.idefics import IdeficsProcessor
from sdk.images.processors.minicpm import QueriedSliceProcessor, SliceProcessor
from sdk.images.processors.pixtral import PixtralProcessor
from sdk.images.processors.qwen import QwenProcessor
from sdk.images.processors.settings import Settings
from sdk.images.processors.square import (
    DualProcessor,
    GemmaProcessor,
    LlavaProcessor,
    NaflexProcessor,
    PaliGemmaProcessor,
)
from sdk.quant.errors import UnsupportedError

_Maker = Callable[[Settings], ImageProcessor]
_QWEN: dict[str, _Maker] = {
    "Qwen2VLImageProcessor": QwenProcessor,
    "Qwen2_5_VLImageProcessor": QwenProcessor,
    "Qwen3VLImageProcessor": QwenProcessor,
}
_IDEFICS: dict[str, _Maker] = {
    "Idefics3ImageProcessor": IdeficsProcessor,
    "SmolVLMImageProcessor": IdeficsProcessor,
}
#: model_type -> transformers' classes of image processors that its checkpoints name -> ours. The
#: first is taken where none is named.
_PROCESSORS: dict[str, dict[str, _Maker]] = {
    "clip": {"CLIPImageProcessor": DualProcessor},
    "siglip": {"SiglipImageProcessor": DualProcessor},
    "siglip2": {"Siglip2ImageProcessor": NaflexProcessor},
    "gemma3": {"Gemma3ImageProcessor": GemmaProcessor},
    "paligemma": {"SiglipImageProcessor": PaliGemmaProcessor},
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "llava": {
        "CLIPImageProcessor": LlavaProcessor,
        "LlavaImageProcessor": LlavaProcessor,
        "SiglipImageProcessor": LlavaProcessor,
        "PixtralImageProcessor": PixtralProcessor,
    },
    "llava_next": {"LlavaNextImageProcessor": AnyResolutionProcessor},
    "llava_onevision": {"LlavaOnevisionImageProcessor": OneVisionProcessor},
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "minicpmv": {"MiniCPMVImageProcessor": QueriedSliceProcessor},
    "minicpmv4_6": {"MiniCPMV4_6ImageProcessor": SliceProcessor},
    "mistral3": {"PixtralImageProcessor": PixtralProcessor},
    "internvl": {"GotOcr2ImageProcessor": InternProcessor},
    "lfm2_vl": {"Lfm2VlImageProcessor": LfmProcessor},
    "gemma4": {"Gemma4ImageProcessor": Gemma4Processor},
}


def image_processor(config: Mapping[str, Any], processor: Mapping[str, Any]) -> ImageProcessor:
    """The image processor of a checkpoint.

    ``config``: its ``config.json``. ``processor``: its ``preprocessor_config.json`` or
    ``processor_config.json``; ``{}`` takes the defaults of transformers' class.

    :raises UnsupportedError: another model or image processor, or a value that is not supported.
    :raises CheckpointError: a value is invalid or contradicts the tower.
    """
    whole = config.get("multimodal_config", config)  # of a checkpoint: all but text and vision
    model_type = str(whole.get("model_type"))
    makers = _PROCESSORS.get(model_type)
    if makers is None:
        raise UnsupportedError(
            f"model_type {model_type!r} has no image processor here, expected one of "
            f"{', '.join(sorted(_PROCESSORS))}: load it for text only"
        )
    settings = Settings({**whole, "vision_config": config.get("vision_config")}, processor)
    maker = makers.get(settings.kind or next(iter(makers)))
    if maker is None:
        raise settings.unsupported("image_processor_type", settings.kind, " or ".join(makers))
    return maker(settings)


__all__ = ["ImageProcessor", "image_processor"]
