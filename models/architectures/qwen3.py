"""Qwen 3: Llama with an RMSNorm over every query and key head before the rotation."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, LayerRules
from sdk.models.architectures.qwen2 import upper_layers

ARCHITECTURE = Architecture(
    "qwen3",
    layer=LayerRules(qk_norm="head"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "layer_types"),
            *("use_sliding_window", "sliding_window", "max_window_layers"),
        ),
        defaults={"head_dim": 128},
        stated=("hidden_act", "use_sliding_window", "sliding_window", "max_window_layers"),
        sliding=upper_layers,
    ),
    gguf=GgufRules("qwen3"),
)
