"""Jamba: Mamba-1 with norms, attention without rotation in some layers, experts in some.

Lieber et al., "Jamba" (2024), arXiv 2403.19887; transformers' modeling_jamba.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    RECURRENT,
    Architecture,
    Biases,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.mamba import (
    GGUF_KEYS,
    GGUF_TENSORS,
    SIZES,
    derive_sizes,
    read_sizes,
    spec_of,
)
from sdk.models.configs.fields import MAX_EXPERTS, Fields
from sdk.models.mixers.mamba import MambaSpec

_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_KINDS = {_MAMBA: RECURRENT, _ATTENTION: Blocks()}


def _derived(config: dict[str, Any]) -> None:
    """Which layers attend and which have experts, unless a GGUF file has said it."""
    derive_sizes(config, "mamba_expand")
    layers = config.get("num_hidden_layers")
    if "layer_types" not in config:
        attends = _every(
            layers, config.get("attn_layer_period", 8), config.get("attn_layer_offset", 4)
        )
        config["layer_types"] = [_ATTENTION if one else _MAMBA for one in attends]
    if "mlp_layer_types" not in config:
        sparse = _every(
            layers, config.get("expert_layer_period", 2), config.get("expert_layer_offset", 1)
        )
        config["mlp_layer_types"] = ["sparse" if one else "dense" for one in sparse]


def _every(layers: Any, period: Any, offset: Any) -> Sequence[bool]:
    """Which layers have ``offset`` as the rest of their number; none if a config has no numbers."""
    if not all(type(one) is int for one in (layers, period, offset)) or period < 1:
        return []
    return [layer % period == offset for layer in range(layers)]


def _some_experts(fields: Fields) -> bool:
    """One expert is an MLP."""
    name = "num_local_experts" if fields.has("num_local_experts") else "num_experts"
    return fields.count(name, MAX_EXPERTS) > 1


def _recurrent(fields: Fields) -> MambaSpec | None:
    if _MAMBA not in fields.values.get("layer_types", ()):
        return None
    return spec_of(fields, norms="weighted")


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Layers without key/value heads are Mamba-1, those without a router have an MLP."""
    read_sizes(config, keys, {name: name for name in SIZES})
    layers = config["num_hidden_layers"]
    attends = keys.present("attention.head_count_kv", layers)
    config["layer_types"] = [_ATTENTION if one else _MAMBA for one in attends]
    routers = [keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in range(layers)]
    config["mlp_layer_types"] = ["sparse" if one else "dense" for one in routers]
    if not any(routers):
        config["num_experts"] = 1


ARCHITECTURE = Architecture(
    "jamba",
    layer=LayerRules(route=RouteRule(normalized=False)),
    config=ConfigRules(
        keys=(
            *("layer_types", "mlp_layer_types", "num_experts", "num_local_experts"),
            *("num_experts_per_tok",),
            *("attn_layer_period", "attn_layer_offset", "expert_layer_period"),
            *("expert_layer_offset", "mamba_expand", *SIZES),
        ),
        ignored=(
            *("use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep"),
            *("layers_block_type", "layers_num_experts"),
        ),
        defaults={
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "rms_norm_eps": 1e-6,
        },
        fixed={"hidden_act": "silu"},
        derived=_derived,
        biases=lambda fields: Biases(),
        unrotated=lambda fields, windows: [True] * len(windows),
        expert_width="intermediate_size",
        dense_width="intermediate_size",
        has_experts=_some_experts,
        kinds=_KINDS,
        recurrent=_recurrent,
    ),
    tensors=TensorRules(
        names={
            "model.norm": "model.final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp.gate": "feed_forward.router",
            "mlp": "feed_forward",
        }
    ),
    more_gguf=(
        GgufRules(
            "jamba",
            tensors={
                **GGUF_TENSORS,
                "mamba.dt_layernorm": "ssm_dt_norm",
                "mamba.b_layernorm": "ssm_b_norm",
                "mamba.c_layernorm": "ssm_c_norm",
            },
            read=_read_gguf,
            keys=GGUF_KEYS,
        ),
    ),
)
