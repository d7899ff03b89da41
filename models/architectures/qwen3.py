"""Qwen 3: Llama with an RMSNorm over every query and key head before the rotation."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.architectures.llama import LlamaLayer
from sdk.models.architectures.qwen2 import upper_layers
from sdk.models.decoder import Decoder, HeadNormAttention


class Qwen3Layer(LlamaLayer):
    attention_type = HeadNormAttention


class Model(Decoder):
    """A :class:`sdk.models.decoder.CausalLM`."""

    layer = Qwen3Layer


ARCHITECTURE = Architecture(
    "qwen3",
    Model,
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
