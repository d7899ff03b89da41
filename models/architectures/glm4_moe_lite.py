"""GLM-4.7-Flash: DeepSeek V3 with other widths, and a list of the layers that have experts.

transformers' modeling_glm4_moe_lite.py. GGUF files call themselves ``deepseek2``: see
:mod:`sdk.models.architectures.deepseek_v3`.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, LayerRules, NextTokenRules
from sdk.models.architectures.deepseek_v3 import IGNORED
from sdk.models.architectures.glm4_moe import V3_KEYS, V3_ROUTE
from sdk.models.configs.latent import LATENT_KEYS, latent_of

ARCHITECTURE = Architecture(
    "glm4_moe_lite",
    layer=LayerRules(route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(*LATENT_KEYS, *V3_KEYS, "num_local_experts", "mlp_layer_types"),
        ignored=(*IGNORED, "first_k_dense_replace"),
        defaults={"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, "n_shared_experts": 1},
        fixed={"scoring_func": "sigmoid"},
        expert_width="moe_intermediate_size",
        latent=latent_of,
    ),
    next_token=NextTokenRules(),
)
