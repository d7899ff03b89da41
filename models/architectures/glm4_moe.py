"""GLM-4.5 to 4.7: experts chosen by sigmoids with a bias, a shared one, and dense first layers.

Heads turn by half. Zeng et al., "GLM-4.5" (2025); transformers' modeling_glm4_moe.py.
"""

from __future__ import annotations

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufRules,
    LayerRules,
    NextTokenRules,
)
from sdk.models.configs.fields import Fields

#: The router of DeepSeek V3: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.1.2.
V3_ROUTE = RouteRule("sigmoid", epsilon=1e-20)
#: The keys of V3's router, and of its experts.
V3_KEYS = (
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
)


def biases(fields: Fields) -> Biases:
    """Of q, k and v alone."""
    return Biases(qkv=fields.flag("attention_bias", default=False))


ARCHITECTURE = Architecture(
    "glm4_moe",
    layer=LayerRules(qk_norm="head", route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(
            *("attention_bias", "partial_rotary_factor", "use_qk_norm", *V3_KEYS),
            *("num_local_experts", "first_k_dense_replace"),
        ),
        # of the layer after the last one: its tensors say that it is there
        ignored=("num_nextn_predict_layers", "num_mtp_layers"),
        defaults={"partial_rotary_factor": 0.5, "use_qk_norm": False},
        expert_width="moe_intermediate_size",
        biases=biases,
    ),
    gguf=GgufRules(
        "glm4moe",
        tensors={"post_attention_layernorm": "post_attention_norm"},
        expert_gating=2,
        keys=("nextn_predict_layers",),
    ),
    # Ling and Ring 2.0, Sarvam: the same computation
    more_gguf=(
        GgufRules(
            "bailingmoe2",
            tensors={"final_layernorm": "layer_output_norm"},
            expert_gating=2,
            keys=("nextn_predict_layers",),
        ),
    ),
    next_token=NextTokenRules(),
)
