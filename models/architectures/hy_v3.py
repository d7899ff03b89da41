"""Hunyuan 3: experts chosen by sigmoids with a bias, a shared one, and a dense first layer.

transformers' modeling_hy_v3.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, LayerRules
from sdk.models.architectures.glm4_moe import V3_ROUTE

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
)
