"""Qwen 3 with experts: some layers, or all, have a mixture of experts instead of the MLP.

"Qwen3 Technical Report" (2025); transformers' modeling_qwen3_moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, LayerRules
from sdk.models.configs.fields import Fields
from sdk.models.configs.sliding import all_but_every
from sdk.quant.errors import UnsupportedError


def _sliding(fields: Fields, layers: int) -> Sequence[bool]:
    """All layers, if ``use_sliding_window`` is set."""
    if not fields.flag("use_sliding_window", default=False):
        return [False] * layers
    return all_but_every(1)(fields, layers)


def read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Weights of experts sum to 1, also in the vision model's files."""
    config["norm_topk_prob"] = True


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """llama.cpp assumes experts in every layer and weights of experts that sum to 1."""
    dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
    if dense or not config.get("norm_topk_prob"):
        raise UnsupportedError(
            f"{source}: {config['model_type']} is written as a GGUF file only with norm_topk_prob "
            "and experts in every layer: the file cannot express anything else"
        )
    return {}


ARCHITECTURE = Architecture(
    "qwen3_moe",
    layer=LayerRules(qk_norm="head"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "use_sliding_window", "sliding_window"),
            *("num_experts", "num_local_experts", "num_experts_per_tok", "norm_topk_prob"),
            *("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
        ),
        ignored=("max_window_layers",),  # of Qwen 3 without experts
        defaults={"norm_topk_prob": False},
        sliding=_sliding,
        expert_width="moe_intermediate_size",
    ),
    gguf=GgufRules("qwen3moe", read=read_gguf, write=_write_gguf),
)
