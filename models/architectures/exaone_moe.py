"""K-EXAONE: EXAONE 4's windows and rotations, norms before blocks, and DeepSeek V3's experts.

transformers' modeling_exaone_moe.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    NextTokenRules,
)
from sdk.models.architectures.exaone4 import unrotated
from sdk.models.architectures.glm4_moe import V3_ROUTE
from sdk.models.configs.sliding import all_but_every


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["layer_types"] = keys.layer_types(
        config["num_hidden_layers"], window=config["sliding_window"], period=4
    )


ARCHITECTURE = Architecture(
    "exaone_moe",
    layer=LayerRules(qk_norm="head", route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(
            *("layer_types", "sliding_window", "sliding_window_pattern", "num_experts"),
            *("num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"),
            *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
            *("first_k_dense_replace", "mlp_layer_types"),
        ),
        # of the layer after the last one: its tensors say that it is there
        ignored=(
            "num_nextn_predict_layers",
            "scoring_func",
            "topk_method",
            "first_last_k_dense_replace",
        ),
        defaults={"routed_scaling_factor": 2.5},
        sliding=all_but_every(4),
        unrotated=unrotated,
        expert_width="moe_intermediate_size",
        biases=lambda fields: Biases(),
    ),
    more_gguf=(
        GgufRules(
            "exaone-moe",
            read=_read_gguf,
            expert_gating=2,
            keys=(
                *("attention.sliding_window_pattern", "rope.freq_base_swa", "nextn_predict_layers"),
            ),
            slides="scaled",
        ),
    ),
    # vLLM builds it as the first layer, which has a window and a rotation
    next_token=NextTokenRules(like=0),
)
