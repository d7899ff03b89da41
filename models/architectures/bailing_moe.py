"""Ling 1: DeepSeekMoE with other names of tensors. Ling team, arXiv 2503.05139 (2025).

transformers has no class for the folders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufRules,
    LayerRules,
    TensorRules,
)

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

#: The layers of DeepSeekMoE.
LAYER = LayerRules(route=RouteRule("softmax", epsilon=1e-20))


def _biases(fields: Fields) -> Biases:
    every = fields.flag("use_bias", default=False)
    return Biases(fields.flag("use_qkv_bias", default=False), every, every)


ARCHITECTURE = Architecture(
    "bailing_moe",
    layer=LAYER,
    config=ConfigRules(
        keys=(
            *("use_bias", "use_qkv_bias", "num_experts", "num_shared_experts", "norm_topk_prob"),
            *("num_experts_per_tok", "moe_intermediate_size", "first_k_dense_replace"),
        ),
        ignored=("embedding_dropout", "output_dropout", "use_rmsnorm", "max_window_layers"),
        defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": True, "first_k_dense_replace": 0},
        fixed={"norm_head": False, "norm_softmax": False, "multi_gate": None},
        expert_width="moe_intermediate_size",
        biases=_biases,
    ),
    tensors=TensorRules(
        names={
            "model.embed_tokens": "model.word_embeddings",
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
        }
    ),
    more_gguf=(GgufRules("bailingmoe", interleaved_qk=True),),
)
