"""Qwen 3-VL, the text part: Qwen 3.

With text alone its interleaved rotation is the usual one, and no features of images are added to
the first layers. transformers' modeling_qwen3_vl.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, LayerRules
from sdk.models.architectures.qwen2_vl_text import MEDIA_KEYS

ARCHITECTURE = Architecture(
    "qwen3_vl_text",
    aliases=("qwen3_vl",),
    layer=LayerRules(qk_norm="head"),
    config=ConfigRules(
        keys=("attention_bias",),
        ignored=(*MEDIA_KEYS, "layer_types"),  # which its code reads and does not use
        defaults={"head_dim": 128, "rope_theta": 500_000.0},
    ),
    gguf=GgufRules("qwen3vl", keys=("n_deepstack_layers",)),
)
