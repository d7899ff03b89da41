"""Trinity (AFMoE): experts as in GLM-4.5, norms around blocks, and a gate on attention's output.

Three of four layers slide, and only those rotate. Arcee AI (2025); transformers'
modeling_afmoe.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    Norms,
    OutputGate,
)
from sdk.models.architectures.glm4_moe import V3_ROUTE
from sdk.models.configs.fields import MAX_LAYERS, Fields


def _sliding(fields: Fields, layers: int) -> list[bool]:
    every = fields.count("global_attn_every_n_layers", MAX_LAYERS, default=4)
    return [(i + 1) % every != 0 for i in range(layers)]


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    return [window is None for window in windows]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    layers, window = config["num_hidden_layers"], config["sliding_window"]
    config["layer_types"] = keys.layer_types(layers, window=window, period=4)
    config["mup_enabled"] = True


ARCHITECTURE = Architecture(
    "afmoe",
    layer=LayerRules(
        norms=Norms(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_mlp_layernorm",
            "post_mlp_layernorm",
        ),
        qk_norm="head",
        route=V3_ROUTE,
        route_bias=True,
        output_gate=OutputGate(),
    ),
    config=ConfigRules(
        keys=(
            *("attention_bias", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("num_shared_experts", "num_dense_layers", "route_scale", "mup_enabled"),
            *("sliding_window", "layer_types", "global_attn_every_n_layers"),
        ),
        # of published files: transformers computes it this way whatever they say
        ignored=("route_norm", "score_func", "n_group", "topk_group", "use_grouped_mm"),
        defaults={
            "head_dim": 128,
            "mup_enabled": False,
            "sliding_window": 1024,
            "num_dense_layers": 1,
            "num_shared_experts": 2,
        },
        sliding=_sliding,
        unrotated=_unrotated,
        embedding_scale=sqrt,
        expert_width="moe_intermediate_size",
    ),
    more_gguf=(
        GgufRules(
            "afmoe",
            tensors={
                "self_attn.gate_proj": "attn_gate",
                "post_attention_layernorm": "post_attention_norm",
                "pre_mlp_layernorm": "ffn_norm",
                "post_mlp_layernorm": "post_ffw_norm",
            },
            read=_read_gguf,
            expert_gating=2,
            keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
            slides="scaled",
        ),
    ),
)
