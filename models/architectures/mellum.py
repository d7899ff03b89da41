"""Mellum 2: Qwen 3 with experts whose sliding layers have a rotary embedding of their own.

JetBrains (2026); transformers' modeling_mellum.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, LayerRules


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    layers, window = config["num_hidden_layers"], config["sliding_window"]
    config["layer_types"] = keys.layer_types(layers, window=window, period=4)
    config["norm_topk_prob"] = True


ARCHITECTURE = Architecture(
    "mellum",
    layer=LayerRules(qk_norm="head"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "layer_types", "sliding_window", "mlp_layer_types"),
            *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
            "moe_intermediate_size",
        ),
        # of layers after the last one, which transformers does not load
        ignored=(
            *("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types"),
            "mtp_mlp_layer_types",
        ),
        defaults={"head_dim": 128, "norm_topk_prob": True},
        expert_width="moe_intermediate_size",
    ),
    more_gguf=(
        GgufRules(
            "mellum",
            read=_read_gguf,
            keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
            slides="plain",
        ),
    ),
)
