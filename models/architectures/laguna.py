"""Laguna: layers that slide have more query heads, and a rotary embedding of their own.

Attention's output has a gate of softplus, one for each head or each feature; experts as in DeepSeek
V3. poolside (2026); transformers' modeling_laguna.py.
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
)
from sdk.models.architectures.glm4_moe import V3_ROUTE
from sdk.models.configs.fields import Fields

PATTERN = "attention.sliding_window_pattern"


def _gate_per_head(fields: Fields) -> bool:
    gating = fields.values.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        fields.fail("gating", "true, 'per-head' or 'per-element'", gating)
    return bool(gating != "per-element")


def two_rotations(config: dict[str, Any], keys: GgufKeys) -> None:
    """The rotary embeddings of layers that see all tokens, and of those that slide, which turn
    another share of a head and have no scaling. Also of other models."""
    width, base = config["head_dim"], config["rope_theta"]
    turning = round(config.pop("partial_rotary_factor", 1.0) * width)
    local = keys.integer("rope.dimension_count_swa", (2, width), turning)
    config["rope_parameters"] = {
        "full_attention": {
            **(config.pop("rope_scaling") or {"rope_type": "default"}),
            "rope_theta": base,
            "partial_rotary_factor": turning / width,
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa") or base,
            "partial_rotary_factor": local / width,
        },
    }


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """The first of four layers sees all tokens, if a file does not say which."""
    layers, window = config["num_hidden_layers"], config["sliding_window"]
    pattern = keys.get(PATTERN)
    if pattern is not None and not isinstance(pattern, int):  # a value for each layer
        config["layer_types"] = keys.layer_types(layers, window=window, period=4)
    else:
        every = keys.integer(PATTERN, (1, 512), 4)
        slides = [bool(window) and i % every != 0 for i in range(layers)]
        config["layer_types"] = ["sliding_attention" if x else "full_attention" for x in slides]
    two_rotations(config, keys)
    per_head = keys.rows("blk.0.attn_gate.weight") == config["num_attention_heads_per_layer"][0]
    config["gating"] = "per-head" if per_head else "per-element"


ARCHITECTURE = Architecture(
    "laguna",
    layer=LayerRules(
        qk_norm="head",
        route=V3_ROUTE,
        route_bias=True,
        output_gate=OutputGate("g_proj", "softplus", per_head=True),
    ),
    config=ConfigRules(
        keys=(
            *("attention_bias", "gating", "layer_types", "sliding_window", "mlp_layer_types"),
            *("num_attention_heads_per_layer", "num_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "shared_expert_intermediate_size"),
            *("moe_routed_scaling_factor", "partial_rotary_factor", "first_k_dense_replace"),
        ),
        # of published files: the code computes it this way whatever they say
        ignored=("gating_types", "num_local_experts", "moe_router_use_sigmoid", "norm_topk_prob"),
        fixed={"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0},
        defaults={"head_dim": 128, "sliding_window": 512},
        expert_width="moe_intermediate_size",
        gate_per_head=_gate_per_head,
    ),
    more_gguf=(
        GgufRules(
            "laguna",
            tensors={"self_attn.g_proj": "attn_gate"},
            read=_read_gguf,
            expert_gating=2,
            keys=(PATTERN, "rope.freq_base_swa", "rope.dimension_count_swa"),
        ),
    ),
)
