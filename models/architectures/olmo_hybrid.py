"""OLMo Hybrid: gated delta nets with norms before blocks, and OLMo 3's attention with norms after.

Published models do not rotate. Strengths of updates go up to 2. transformers'
modeling_olmo_hybrid.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.models.architecture import (
    NORMS_AFTER,
    RECURRENT,
    Architecture,
    Blocks,
    ConfigRules,
    LayerRules,
    Norms,
    TensorRules,
)
from sdk.models.architectures import qwen3_next
from sdk.models.configs.fields import Fields
from sdk.models.mixers.gated_delta_net import GatedDeltaSpec


def _derived(config: dict[str, Any]) -> None:
    """The kinds of layers and the sizes of delta nets, as transformers' class fills them in."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    if config.get("layer_types") is None and isinstance(layers, int):
        kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
        if "full_attention" not in kinds:
            kinds[-1] = "full_attention"
        config["layer_types"] = kinds
    for side in ("key", "value"):
        if config.get(f"linear_num_{side}_heads") is None:
            config[f"linear_num_{side}_heads"] = heads
    keys, hidden = config["linear_num_key_heads"], config.get("hidden_size")
    missing = config.get("linear_key_head_dim") is None
    if missing and isinstance(keys, int) and keys > 0 and isinstance(hidden, int):
        config["linear_key_head_dim"] = int(0.75 * hidden / keys)
    if config.get("linear_value_head_dim") is None and config.get("linear_key_head_dim"):
        config["linear_value_head_dim"] = 2 * config["linear_key_head_dim"]


def _recurrent(fields: Fields) -> GatedDeltaSpec:
    twice = fields.flag("linear_allow_neg_eigval", default=True)
    return qwen3_next.recurrent(fields)._replace(strength=2.0 if twice else 1.0, norm_eps=1e-5)


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    places = fields.values, fields.mapping("rope_parameters")
    return [all(one.get("rope_theta") is None for one in places)] * len(windows)


ARCHITECTURE = Architecture(
    "olmo_hybrid",
    layer=LayerRules(norms=NORMS_AFTER, qk_norm="width", recurrent_norms=Norms()),
    config=ConfigRules(
        keys=(
            *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
            *("linear_value_head_dim", "linear_conv_kernel_dim", "layer_types"),
            *("attention_bias", "linear_allow_neg_eigval"),
        ),
        ignored=(
            *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
            "linear_dt_init_floor",
        ),
        defaults={"linear_conv_kernel_dim": 4},
        fixed={"hidden_act": "silu"},
        derived=_derived,
        unrotated=_unrotated,
        kinds={"linear_attention": RECURRENT, "full_attention": Blocks()},
        recurrent=_recurrent,
    ),
    tensors=TensorRules(
        names={
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
            "linear_attn.in_proj_z": "linear_attn.g_proj",
            "linear_attn.in_proj_b": "linear_attn.b_proj",
            "linear_attn.in_proj_a": "linear_attn.a_proj",
            "linear_attn.norm": "linear_attn.o_norm",
            "linear_attn.out_proj": "linear_attn.o_proj",
        }
    ),
)
