"""OLMoE: Llama with experts and q/k norms over all heads at once.

Muennighoff et al., "OLMoE" (2024); transformers' modeling_olmoe.py. Weights of the chosen experts
do not sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, LayerRules
from sdk.quant.errors import UnsupportedError


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["norm_topk_prob"] = False


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UnsupportedError(
            f"{source}: olmoe is written as a GGUF file only with as many num_key_value_heads as "
            f"heads {heads}, found {kv_heads}: llama.cpp has no others"
        )
    if config.get("norm_topk_prob"):
        raise UnsupportedError(
            f"{source}: olmoe is written as a GGUF file only without norm_topk_prob: the file "
            "cannot express it"
        )
    return {}


ARCHITECTURE = Architecture(
    "olmoe",
    layer=LayerRules(qk_norm="width"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok"),
            "norm_topk_prob",
        ),
        ignored=("sliding_window",),  # transformers gives it to flash attention, not to the mask
        defaults={"norm_topk_prob": False},
        fixed={"clip_qkv": None},
        expert_width="intermediate_size",
    ),
    gguf=GgufRules("olmoe", read=_read_gguf, write=_write_gguf),
)
