"""Step-3.5 and the text part of Step-3.7: layers with a window have more query heads.

Every fourth layer sees all tokens and turns half of a head, the others all of it. A sigmoid for
each head gates what attention adds. Experts as MiniMax-M2's with a shared one, after dense layers;
in some layers both factors of an MLP are clamped. StepFun, "Step-3.5-Flash" (2026); transformers'
modeling_step3p7.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerCaches,
    LayerRules,
    OutputGate,
    TensorRules,
)
from sdk.models.architectures.laguna import PATTERN
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.quant.caches import AttentionCache
from sdk.quant.errors import CheckpointError

_KINDS = ("full_attention", "sliding_attention")
_MAX_HEAD = 4096
#: Lists of StepFun's files that may count the blocks after the last layer, too.
_LISTS = (
    *("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared"),
    *("rope_theta", "partial_rotary_factors"),
)
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"


def _derived(config: dict[str, Any]) -> None:
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return
    for key in _LISTS:
        if isinstance(config.get(key), list):
            config[key] = config[key][:layers]
    if config.get("share_expert_dims") is not None:  # transformers' other name of it
        config["shared_expert_intermediate_size"] = config["share_expert_dims"]
    kinds = config.get("layer_types") or [_KINDS[0]] * layers
    sparse = config.get("moe_layers_enum")
    if config.get("mlp_layer_types") is None:
        items = sparse.split(",") if isinstance(sparse, str) else sparse
        chosen = range(3, layers) if items is None else {int(i) for i in items if str(i).strip()}
        config["mlp_layer_types"] = ["sparse" if i in chosen else "dense" for i in range(layers)]
    if f"{_HEADS}_per_layer" not in config:
        for key in (_HEADS, _KV_HEADS):
            config[f"{key}_per_layer"] = _each_layer(config, key, kinds)
    if not config.get("rope_parameters"):
        config["rope_parameters"] = _rotations(config, kinds)
    config.pop("rope_scaling", None)


def _each_layer(config: dict[str, Any], key: str, kinds: Sequence[str]) -> list[Any]:
    """How many heads each layer has: transformers writes those that differ as ``per_layer_config``,
    StepFun's files those of layers with a window as ``attention_other_setting``."""
    usual, other = config.get(key), config.get("attention_other_setting") or {}
    slides = other.get({_KV_HEADS: "num_attention_groups"}.get(key, key), usual)
    if key == _HEADS and config.get("num_sliding_attention_heads"):
        slides = config["num_sliding_attention_heads"]
    each = [slides if kind == _KINDS[1] else usual for kind in kinds]
    for layer, own in (config.get("per_layer_config") or {}).items():
        known = isinstance(own, dict) and own.keys() <= {_HEADS, _KV_HEADS}
        if not known or not str(layer).isdecimal() or int(layer) >= len(each):
            raise CheckpointError(
                f"config: per_layer_config: expected {_HEADS} and {_KV_HEADS} of layers, found "
                f"{layer!r}: {own!r}"
            )
        each[int(layer)] = own.get(key, each[int(layer)])
    return each


def _rotations(config: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """StepFun's files have a base and a share for each layer, and a scaling of the layers that see
    all tokens."""
    bases, shares = config.get("rope_theta", 10_000.0), config.get("partial_rotary_factors")
    found = {}
    for kind in _KINDS:
        layer = kinds.index(kind) if kind in kinds else 0
        own = {"rope_theta": bases[layer] if isinstance(bases, list) else bases}
        if isinstance(shares, list) and shares:
            own["partial_rotary_factor"] = shares[layer]
        found[kind] = {"rope_type": "default", **own}
    found[_KINDS[0]].update(config.get("rope_scaling") or {})
    config.pop("rope_theta", None)
    return found


def _caches(fields: Fields, windows: Sequence[int | None]) -> LayerCaches:
    width = fields.count("head_dim", _MAX_HEAD)
    key = f"{_KV_HEADS}_per_layer"
    each = fields.values.get(key)
    if not isinstance(each, (list, tuple)) or len(each) != len(windows):
        fields.fail(key, f"a list of {len(windows)} numbers", each)
    counts = Fields({str(i): one for i, one in enumerate(each)}, f"config: {key}")
    return [
        AttentionCache(counts.count(str(i), MAX_WIDTH), width, width, window)
        for i, window in enumerate(windows)
    ]


def limits(key: str, fields: Fields, layers: int) -> list[float | None]:
    """The clamp of both factors of an MLP in each layer; 0 or null is none."""
    found = fields.values.get(key)
    if found is None:
        return []
    if not isinstance(found, (list, tuple)) or len(found) != layers:
        fields.fail(key, f"a list of {layers} numbers", found)
    each = Fields({str(i): one or None for i, one in enumerate(found)}, f"config: {key}")
    return [each.optional_positive(str(i)) for i in range(layers)]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """llama.cpp turns half of the dimensions that a file says in layers that see all tokens."""
    layers, base = config["num_hidden_layers"], config.pop("rope_theta")
    config["layer_types"] = keys.layer_types(layers, window=config["sliding_window"], period=4)
    turning = config.pop("partial_rotary_factor", 1.0)
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    if "factors" in scaling:
        scaling["factors"] = scaling["factors"][: len(scaling["factors"]) // 2]
    config["rope_parameters"] = {
        _KINDS[0]: {**scaling, "rope_theta": base, "partial_rotary_factor": turning / 2},
        _KINDS[1]: {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa") or base,
            "partial_rotary_factor": turning,
        },
    }
    dense = [not keys.has_tensor(f"blk.{i}.ffn_gate_inp.weight") for i in range(layers)]
    config["mlp_layer_types"] = ["dense" if one else "sparse" for one in dense]
    for key, own in (
        ("swiglu_clamp_exp", "swiglu_limits"),
        ("swiglu_clamp_shexp", "swiglu_limits_shared"),
    ):
        found = keys.get(key)
        if found is not None:
            each = [found] * layers if isinstance(found, int | float) else list(found)[:layers]
            config[own] = [float(one) for one in each]


ARCHITECTURE = Architecture(
    "step3p5",
    aliases=("step3p7",),
    layer=LayerRules(
        qk_norm="head",
        route=RouteRule("sigmoid"),
        route_bias=True,
        output_gate=OutputGate("g_proj", per_head=True),
    ),
    config=ConfigRules(
        keys=(
            *("n_routed_experts", "num_local_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "shared_expert_intermediate_size", "mlp_layer_types"),
            *("router_scaling_factor", "norm_topk_prob", "layer_types", "sliding_window"),
            *("attention_bias", "mlp_bias", "query_pre_attn_scalar", "per_layer_config"),
            *("num_sliding_attention_heads", "attention_other_setting", "moe_layers_enum"),
            *("swiglu_limits", "swiglu_limits_shared", "partial_rotary_factors"),
            "share_expert_dims",
            *(f"{_HEADS}_per_layer", f"{_KV_HEADS}_per_layer"),
        ),
        # of the layers after the last one, and what the code computes whatever a file says
        ignored=(
            *("num_nextn_predict_layers", "num_mtp_layers", "mtp_layer_types"),
            *("mtp_mlp_layer_types", "norm_expert_weight", "moe_router_activation"),
            *("use_moe", "use_moe_router_bias", "need_fp32_gate", "use_head_wise_attn_gate"),
            *("use_rope_layers", "yarn_only_types", "use_qk_norm", "moe_every_n_layer"),
            *("max_seq_len", "zero_centered", "att_impl_type"),
        ),
        defaults={
            "head_dim": 128,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "shared_expert_intermediate_size": 1280,
        },
        names={
            "num_key_value_heads": "num_attention_groups",
            "n_routed_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_top_k",
            "shared_expert_intermediate_size": "share_expert_dim",
            "router_scaling_factor": "moe_router_scaling_factor",
        },
        derived=_derived,
        caches=_caches,
        limits=limits,
        expert_width="moe_intermediate_size",
    ),
    tensors=TensorRules(
        norms_minus_one=True,
        experts_apart=True,
        names={
            "mlp.gate.e_score_correction_bias": "moe.router_bias",
            "mlp.gate": "moe.gate",
            "mlp.experts.gate_proj": "moe.gate_proj.weight",
            "mlp.experts.up_proj": "moe.up_proj.weight",
            "mlp.experts.down_proj": "moe.down_proj.weight",
            "mlp.shared_experts": "share_expert",
        },
    ),
    more_gguf=(
        GgufRules(
            "step35",
            tensors={"self_attn.g_proj": "attn_gate"},
            read=_read_gguf,
            expert_gating=2,
            keys=(
                *(PATTERN, "rope.freq_base_swa", "nextn_predict_layers", "swiglu_clamp_exp"),
                *("swiglu_clamp_shexp", "moe_every_n_layers", "leading_dense_block_count"),
            ),
        ),
    ),
)
