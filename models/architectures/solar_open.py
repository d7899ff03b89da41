"""Solar Open: GLM-4.5 whose heads turn whole, with experts in every layer.

transformers' modeling_solar_open.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, LayerRules
from sdk.models.architectures.glm4_moe import V3_KEYS, V3_ROUTE, biases

ARCHITECTURE = Architecture(
    "solar_open",
    layer=LayerRules(route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=("attention_bias", "num_local_experts", *V3_KEYS),
        ignored=("first_k_dense_replace", "num_nextn_predict_layers"),
        defaults={"head_dim": 128, "rope_theta": 1_000_000.0},
        expert_width="moe_intermediate_size",
        biases=biases,
    ),
)
