"""ERNIE 4.5 with experts: a softmax over all, with a bias of the choice; shared experts.

Baidu, "ERNIE 4.5 Technical Report" (2025); transformers' modeling_ernie4_5_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.configs.fields import MAX_LAYERS, Fields
from sdk.quant.errors import UnsupportedError


def _biases(fields: Fields) -> Biases:
    every = fields.flag("use_bias", default=False)
    return Biases(every, every, every, every)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["moe_layer_interval"] = keys.integer("interleave_moe_layer_step", (1, MAX_LAYERS), 1)


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    last = config.get("moe_layer_end_index", -1)
    if last not in (-1, config["num_hidden_layers"] - 1):
        raise UnsupportedError(
            f"{source}: ernie4_5_moe is written as a GGUF file only with experts up to the last "
            f"layer, found moe_layer_end_index {last}: the file cannot express anything else"
        )
    width = config["moe_intermediate_size"] * config["moe_num_shared_experts"]
    return {
        "interleave_moe_layer_step": int(config["moe_layer_interval"]),
        "expert_shared_feed_forward_length": int(width),
    }


ARCHITECTURE = Architecture(
    "ernie4_5_moe",
    layer=LayerRules(adjacent_pairs=True, route_bias=True),
    config=ConfigRules(
        keys=(
            *("use_bias", "moe_num_experts", "num_experts", "moe_k", "num_experts_per_tok"),
            *("moe_intermediate_size", "moe_num_shared_experts", "moe_layer_start_index"),
            *("moe_layer_end_index", "moe_layer_interval", "moe_norm_min"),
        ),
        defaults={
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
            "moe_layer_start_index": 1,
            "moe_norm_min": 1e-12,
        },
        expert_width="moe_intermediate_size",
        biases=_biases,
    ),
    gguf=GgufRules(
        "ernie4_5-moe",
        read=_read_gguf,
        write=_write_gguf,
        keys=("interleave_moe_layer_step",),
        only={"use_bias": False, "moe_layer_interval": 1},
    ),
)
