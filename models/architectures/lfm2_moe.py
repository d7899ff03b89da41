"""LFM2 with experts, after two dense layers: sigmoids with a bias of the choice choose them.

transformers' modeling_lfm2_moe.py.
"""

from __future__ import annotations

from typing import Any

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.lfm2 import (
    DEFAULTS,
    GGUF_TENSORS,
    KEYS,
    KINDS,
    NAMES,
    SPELLINGS,
    read_kinds,
    recurrent,
)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_kinds(config, keys)
    config["norm_topk_prob"] = True


ARCHITECTURE = Architecture(
    "lfm2_moe",
    layer=LayerRules(
        qk_norm="head",
        route=RouteRule("sigmoid", epsilon=1e-6),
        route_bias=True,
    ),
    config=ConfigRules(
        keys=(
            *KEYS,
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_dense_layers"),
            *("norm_topk_prob", "routed_scaling_factor"),
        ),
        fixed={"use_expert_bias": True},
        defaults=DEFAULTS,
        norm_eps="norm_eps",
        names=SPELLINGS,
        expert_width="moe_intermediate_size",
        dense_width="intermediate_size",
        biases=lambda fields: Biases(),
        activation=lambda fields: "silu",
        kinds=KINDS,
        recurrent=recurrent,
    ),
    tensors=TensorRules(
        names={
            **NAMES,
            "mlp.gate.e_score_correction_bias": "feed_forward.expert_bias",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "mlp": "feed_forward",
        }
    ),
    more_gguf=(
        GgufRules(
            "lfm2moe",
            tensors={**GGUF_TENSORS, "model.norm": "token_embd_norm"},
            read=_read_gguf,
            expert_gating=2,
            keys=("shortconv.l_cache",),
        ),
    ),
)
