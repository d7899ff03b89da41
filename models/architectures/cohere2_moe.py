"""Command R7B's layers with experts: the first ones are dense, and rotate. modeling_cohere2_moe.py.

The sum of the chosen and of the shared experts is halved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, always
from sdk.models.architectures.cohere import DEFAULTS, LAYER, read_gguf
from sdk.models.configs.sliding import all_but_every
from sdk.quant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    """Layers that see all tokens, but for dense ones if those are not said to slide."""
    kinds = fields.values.get("mlp_layer_types")
    dense = int(fields.values.get("first_k_dense_replace", 0))
    if kinds is None:
        kinds = ["dense" if i < dense else "sparse" for i in range(len(windows))]
    turn = fields.values.get("prefix_dense_sliding_window_pattern", 1) == 1
    return [
        window is None and not (turn and kind == "dense")
        for window, kind in zip(windows, kinds, strict=True)
    ]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_gguf(config, keys)
    layers, window = config["num_hidden_layers"], config["sliding_window"]
    if window is None:
        raise CheckpointError(
            f"{keys.source}: cohere2moe.attention.sliding_window: expected a number, found none"
        )
    config["layer_types"] = keys.layer_types(layers, window=window, period=4)
    dense = keys.integer("feed_forward_length", (0, 1 << 22), 0)
    config["prefix_dense_intermediate_size"] = dense or None
    softmax = keys.integer("expert_gating_func", (0, 4), 2) == 1  # over all: then normalized
    if softmax and not config["norm_topk_prob"]:
        raise UnsupportedError(
            f"{keys.source}: cohere2moe.expert_weights_norm: expected true with a softmax, found "
            "false: shares of a softmax over all experts are not supported"
        )
    config["expert_selection_fn"] = "softmax" if softmax else "sigmoid"
    config["shared_expert_combination_strategy"] = "average"


ARCHITECTURE = Architecture(
    "cohere2_moe",
    layer=LAYER,
    config=ConfigRules(
        keys=(
            *("attention_bias", "logit_scale", "layer_types", "sliding_window"),
            *("sliding_window_pattern", "num_experts", "num_experts_per_tok"),
            *("num_shared_experts", "shared_expert_combination_strategy"),
            *("expert_selection_fn", "norm_topk_prob", "mlp_layer_types"),
            *("first_k_dense_replace", "prefix_dense_intermediate_size"),
            "prefix_dense_sliding_window_pattern",
        ),
        ignored=("num_nextn_predict_layers",),
        defaults={**DEFAULTS, "sliding_window": 4096, "head_dim": 128},
        fixed={"rms_norm_eps": None},
        sliding=all_but_every(4),
        unrotated=_unrotated,
        norm_eps="layer_norm_eps",
        parallel_blocks=always,
        expert_width="intermediate_size",
        dense_width="prefix_dense_intermediate_size",
    ),
    more_gguf=(
        GgufRules(
            "cohere2moe",
            read=_read_gguf,
            expert_gating=(1, 2),
            keys=(
                *("logit_scale", "attention.sliding_window_pattern", "rope.freq_base_swa"),
                "nextn_predict_layers",
            ),
            slides="scaled",
        ),
    ),
)
