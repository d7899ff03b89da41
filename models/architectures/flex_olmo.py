"""FlexOlmo: OLMo 2 with experts. Shi et al., "FlexOlmo" (2025); modeling_flex_olmo.py."""

from __future__ import annotations

from sdk.models.architecture import NORMS_AFTER, Architecture, ConfigRules, LayerRules

ARCHITECTURE = Architecture(
    "flex_olmo",
    layer=LayerRules(norms=NORMS_AFTER, qk_norm="width"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok"),
            "norm_topk_prob",
        ),
        defaults={"norm_topk_prob": False, "rope_theta": 500_000.0},
        expert_width="intermediate_size",
    ),
)
