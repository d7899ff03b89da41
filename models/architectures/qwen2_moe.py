"""Qwen 1.5 and 2 with experts, and shared ones whose sum has a gate.

Qwen team, "Qwen2 Technical Report" (2024); transformers' modeling_qwen2_moe.py.
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
from sdk.models.configs.fields import Fields
from sdk.quant.errors import UnsupportedError


def _sliding(fields: Fields, layers: int) -> list[bool]:
    """Every other layer below ``max_window_layers``, if ``use_sliding_window`` is set."""
    on = fields.flag("use_sliding_window", default=False)
    end = fields.values.get("max_window_layers", 28) if on else 0
    if not isinstance(end, int) or end < 0:
        fields.fail("max_window_layers", "a number of layers", end)
    return [i % 2 == 0 and i < end for i in range(layers)]


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("qkv_bias", default=True))


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """llama.cpp reads neither ``expert_weights_norm`` nor layers without experts."""
    config["norm_topk_prob"] = False
    if not config["shared_expert_intermediate_size"]:
        config["shared_expert_intermediate_size"] = config["intermediate_size"]


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    if dense or config.get("norm_topk_prob"):
        raise UnsupportedError(
            f"{source}: qwen2_moe is written as a GGUF file only without norm_topk_prob and with "
            "experts in every layer: the file cannot express anything else"
        )
    return {}


ARCHITECTURE = Architecture(
    "qwen2_moe",
    layer=LayerRules(shared_gate=True),
    config=ConfigRules(
        keys=(
            *("qkv_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
            *("layer_types", "num_experts", "num_experts_per_tok", "norm_topk_prob"),
            *("moe_intermediate_size", "shared_expert_intermediate_size"),
            *("decoder_sparse_step", "mlp_only_layers"),
        ),
        defaults={"norm_topk_prob": False},
        sliding=_sliding,
        expert_width="moe_intermediate_size",
        biases=_biases,
    ),
    gguf=GgufRules("qwen2moe", read=_read_gguf, write=_write_gguf),
)
