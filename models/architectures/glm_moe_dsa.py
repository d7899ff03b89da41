"""GLM-5: DeepSeek V3.2 whose layers may share what an indexer chooses.

transformers' modeling_glm_moe_dsa.py. See :mod:`sdk.models.architectures.deepseek_v32` for contexts
that are longer than what the indexer chooses.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, GgufRules, LayerRules, NextTokenRules
from sdk.models.architectures.deepseek_v32 import INDEXED, INDEXER_KEYS, read_indexed
from sdk.models.architectures.glm4_moe import V3_ROUTE

ARCHITECTURE = Architecture(
    "glm_moe_dsa",
    layer=LayerRules(route=V3_ROUTE, route_bias=True),
    config=INDEXED._replace(
        defaults={**INDEXED.defaults, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
    ),
    more_gguf=(
        GgufRules(
            "glm-dsa",
            read=read_indexed,
            expert_gating=2,
            keys=INDEXER_KEYS,
            yarn_log_multiplier=True,
        ),
    ),
    next_token=NextTokenRules(),
)
