"""Hunyuan A13B: Hunyuan with experts, and one shared one of their width.

Tencent, "Hunyuan-A13B Technical Report" (2025); transformers' modeling_hunyuan_v1_moe.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.hunyuan_v1_dense import ARCHITECTURE as DENSE, ntk_alpha
from sdk.quant.errors import UnsupportedError


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    width = config["intermediate_size"]
    found = (
        keys.integer("expert_shared_count", (0, 1 << 16), 1),
        keys.integer("expert_shared_feed_forward_length", (0, 1 << 22), width),
    )
    if found != (1, width):
        raise UnsupportedError(
            f"{keys.source}: hunyuan-moe.expert_shared_count, .expert_shared_feed_forward_length: "
            f"expected 1 and {width}, found {found[0]} and {found[1]}"
        )


ARCHITECTURE = Architecture(
    "hunyuan_v1_moe",
    layer=LayerRules(qk_norm="head", norm_after_rotation=True),
    config=ConfigRules(
        keys=(
            *("attention_bias", "num_experts", "num_local_experts", "moe_topk"),
            "num_experts_per_tok",
        ),
        # of published files: transformers computes it this way whatever they say
        ignored=(
            *DENSE.config.ignored,
            *("moe_intermediate_size", "num_shared_expert", "moe_layer_num_skipped"),
            *("use_mixed_mlp_moe", "moe_drop_tokens", "moe_random_routing_dropped_token"),
            *("capacity_factor", "norm_topk_prob", "routed_scaling_factor", "n_group"),
            *("topk_group", "group_limited_greedy"),
        ),
        fixed=DENSE.config.fixed,
        rotation=ntk_alpha,
        expert_width="intermediate_size",
        shared_experts=1,
    ),
    tensors=TensorRules(
        names={
            **DENSE.tensors.names,
            "mlp.gate": "mlp.gate.wg",
            "mlp.shared_experts": "mlp.shared_mlp",
        }
    ),
    more_gguf=(
        GgufRules(
            "hunyuan-moe",
            read=_read_gguf,
            keys=("expert_shared_count", "expert_shared_feed_forward_length"),
        ),
    ),
)
