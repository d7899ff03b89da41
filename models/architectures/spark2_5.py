"""Spark X2.5: Llama with GELU, a gate of a sigmoid for each head, and windows with a rotation of
their own. iFLYTEK (2026). transformers has no class for the folders.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    OutputGate,
    TensorRules,
)
from sdk.models.architectures.laguna import PATTERN, two_rotations


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu"
    layers, window = config["num_hidden_layers"], config["sliding_window"]
    config["layer_types"] = keys.layer_types(layers, window=window, period=1)
    two_rotations(config, keys)


ARCHITECTURE = Architecture(
    "spark2_5",
    layer=LayerRules(output_gate=OutputGate("g_proj", "sigmoid", per_head=True)),
    config=ConfigRules(
        keys=("layer_types", "sliding_window", "partial_rotary_factor"),
        defaults={"hidden_act": "gelu"},
        fixed={
            "hidden_act": "gelu",
            "gate_attn_act_mode": "sigmoid",
            "headwise_attn_output_gate": True,
            "attention_bias": False,
        },
    ),
    tensors=TensorRules(names={"self_attn.qkv_proj": "self_attn.q_k_v_proj"}),
    more_gguf=(
        GgufRules(
            "spark2_5",
            tensors={"self_attn.g_proj": "attn_gate"},
            read=_read_gguf,
            keys=(PATTERN, "rope.freq_base_swa", "rope.dimension_count_swa"),
        ),
    ),
)
