"""MiniMax-M2: experts chosen by sigmoids with a bias; q/k norms over all heads at once.

Half of each head turns. transformers' modeling_minimax_m2.py.
"""

from __future__ import annotations

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufRules,
    LayerRules,
    TensorRules,
)

ARCHITECTURE = Architecture(
    "minimax_m2",
    layer=LayerRules(qk_norm="width", route=RouteRule("sigmoid"), route_bias=True),
    config=ConfigRules(
        keys=(
            *("num_experts", "num_local_experts", "num_experts_per_tok"),
            # transformers' class makes the first of the second
            *("partial_rotary_factor", "rotary_dim"),
        ),
        # of published files: transformers computes it this way whatever they say
        ignored=(
            *("scoring_func", "use_routing_bias", "use_qk_norm", "qk_norm_type"),
            *("attn_type_list", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
            "shared_intermediate_size",
        ),
        defaults={"head_dim": 128, "rope_theta": 5_000_000.0},
        expert_width="intermediate_size",
        biases=lambda fields: Biases(),
    ),
    tensors=TensorRules(block_sparse_moe=True),
    gguf=GgufRules("minimax-m2", expert_gating=2),
)
