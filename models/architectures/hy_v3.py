"""Hunyuan 3: experts chosen by sigmoids with a bias, a shared one, and a dense first layer.

transformers' modeling_hy_v3.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    NextTokenRules,
)
from sdk.models.architectures.glm4_moe import V3_ROUTE
from sdk.quant.errors import CheckpointError


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Files do not count the shared experts, nor dense layers."""
    width = config["moe_intermediate_size"]
    shared = keys.integer("expert_shared_feed_forward_length", (0, 1 << 20), width)
    if shared % width:
        raise CheckpointError(
            f"{keys.source}: hy_v3.expert_shared_feed_forward_length is {shared}, expected a "
            f"multiple of {width}"
        )
    config["num_shared_experts"] = shared // width
    config["first_k_dense_replace"] = 1


ARCHITECTURE = Architecture(
    "hy_v3",
    layer=LayerRules(qk_norm="head", route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(
            *("attention_bias", "mlp_bias", "num_experts", "num_local_experts"),
            *("num_experts_per_tok", "num_shared_experts", "moe_intermediate_size"),
            *("router_scaling_factor", "mlp_layer_types", "first_k_dense_replace"),
        ),
        ignored=("enable_moe_fp32_combine",),  # the sum is float32 here
        defaults={
            "head_dim": 128,
            "rope_theta": 11_158_840.0,
            "router_scaling_factor": 2.826,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        expert_width="moe_intermediate_size",
    ),
    more_gguf=(
        GgufRules(
            "hy_v3",
            tensors={"mlp.gate.e_score_correction_bias": "exp_probs_b"},
            read=_read_gguf,
            expert_gating=2,
            keys=("nextn_predict_layers",),
        ),
    ),
    next_token=NextTokenRules(),
)
