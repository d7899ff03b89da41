"""Hunyuan-VL and HunyuanOCR, the text part: the dense Hunyuan.

The rotation has several positions (XD-RoPE), which are the same for text. transformers'
modeling_hunyuan_vl.py. Published configs have the keys of the text part beside ``vision_config``.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import GgufKeys, GgufRules
from sdk.models.architectures.hunyuan_v1_dense import ARCHITECTURE as DENSE

#: Marks of images, and options of the code of published files that ask for nothing there.
_IGNORED = (
    *("im_start_id", "im_end_id", "im_newline_id", "image_token_id", "image_start_token_id"),
    *("image_end_token_id", "image_newline_token_id", "org_vocab_size", "pad_id"),
    *("attention_head_dim", "norm_type", "routed_scaling_factor", "video_start_id", "video_end_id"),
    *("mlp_bias", "im_start_token_id", "im_end_token_id", "im_newline_token_id", "anyres_vit"),
)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """A file has the base as it is and the factor that enlarges it."""
    alpha = keys.number("rope.scaling.alpha", 0.0)
    if alpha:
        theta = config.pop("rope_theta")
        config["rope_parameters"] = {"rope_type": "xdrope", "alpha": alpha, "rope_theta": theta}


ARCHITECTURE = DENSE._replace(
    model_type="hunyuan_vl_text",
    aliases=("hunyuan_vl",),
    config=DENSE.config._replace(
        ignored=(*DENSE.config.ignored, *_IGNORED),
        defaults={"tie_word_embeddings": True},
        fixed={**DENSE.config.fixed, "num_experts": 1},
    ),
    gguf=None,
    more_gguf=(GgufRules("hunyuan_vl", read=_read_gguf, keys=("rope.scaling.alpha",)),),
)
