"""gpt-oss: experts with biases and a clamped gate, and attention sinks.

Every head has a sink, one more logit that takes probability and gives no value. Every other layer
slides. OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025); transformers' modeling_gpt_oss.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.sliding import all_but_every


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["layer_types"] = keys.layer_types(
        config["num_hidden_layers"], window=config["sliding_window"], period=2
    )
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False


ARCHITECTURE = Architecture(
    "gpt_oss",
    layer=LayerRules(sinks=True, router="router"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "sliding_window", "layer_types"),
            *("num_experts", "num_local_experts", "num_experts_per_tok"),
        ),
        # OpenAI's first names of keys that the config has, too
        ignored=("experts_per_token", "initial_context_length", "num_experts_per_token"),
        defaults={"head_dim": 64, "attention_bias": True},
        sliding=all_but_every(2),
        expert_width="intermediate_size",
        fixed={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        activation=lambda fields: "clamped_swiglu",
    ),
    tensors=TensorRules(
        experts_transposed="always",
        gate_up_interleaved=True,
    ),
    gguf=GgufRules(
        "gpt-oss",
        tensors={
            "self_attn.sinks": "attn_sinks",
            "mlp.router": "ffn_gate_inp",
            "post_attention_layernorm": "post_attention_norm",
        },
        read=_read_gguf,
        expert_gating=3,
        keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
        slides="scaled",
    ),
)
