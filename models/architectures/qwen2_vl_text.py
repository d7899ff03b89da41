"""Qwen 2-VL and 2.5-VL, the text part: Qwen 2.

The rotation has one position for time, height and width each; for text all three are the same, so
it is Qwen 2's. transformers' modeling_qwen2_5_vl.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, Biases, ConfigRules, GgufRules
from sdk.models.architectures.qwen2 import upper_layers

#: The token ids that stand for images and videos, which the tower's outputs replace.
MEDIA_KEYS = (
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id"),
    *("image_token_id", "video_token_id"),
)

ARCHITECTURE = Architecture(
    "qwen2_vl_text",
    aliases=("qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl"),
    config=ConfigRules(
        keys=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        ignored=MEDIA_KEYS,
        sliding=upper_layers,
        biases=lambda fields: Biases(qkv=True),
    ),
    gguf=GgufRules("qwen2vl"),
)
