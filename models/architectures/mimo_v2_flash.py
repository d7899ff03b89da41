"""MiMo-V2: five of six layers have a window, attention sinks and twice the key heads of the others.

Values are narrower than keys, and have a factor. A third of a head turns. Experts as in DeepSeek V3
without shared ones, after a dense layer. Xiaomi, "MiMo-V2-Flash Technical Report" (2026);
transformers' modeling_mimo_v2_flash.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerCaches,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.glm4_moe import V3_KEYS, V3_ROUTE, biases
from sdk.models.architectures.laguna import PATTERN, two_rotations
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.quant.caches import AttentionCache
from sdk.quant.errors import UnsupportedError

_MAX_HEAD = 4096
#: Keys of Xiaomi's files for layers with a window, which must repeat those of the others.
_SAME = {
    "swa_num_attention_heads": "num_attention_heads",
    "swa_head_dim": "head_dim",
    "swa_v_head_dim": "v_head_dim",
}


def _derived(config: dict[str, Any]) -> None:
    """What Xiaomi's files say in keys of their own. transformers' class does not read these and
    fills in the values of one model; those of the file count."""
    for own, other in _SAME.items():
        if config.get(own) is not None and config[own] != config.get(other, config[own]):
            raise UnsupportedError(
                f"config: {own}: expected {other} {config[other]}, found {config[own]}: layers "
                "with a window have the heads of the others"
            )
    if each := config.get("hybrid_layer_pattern"):
        kinds = ("full_attention", "sliding_attention")
        config["layer_types"] = [kinds[bool(one)] for one in each]
    layers = config.get("num_hidden_layers")
    if isinstance(each := config.get("moe_layer_freq"), list) and len(each) == layers:
        config["mlp_layer_types"] = ["sparse" if one else "dense" for one in each]
    if isinstance(layers, int) and config.get("mlp_layer_types") is None:
        config["mlp_layer_types"] = ["dense", *["sparse"] * (layers - 1)]
    if config.get("sliding_window_size") is not None:  # this many before the token itself
        config["sliding_window"] = config["sliding_window_size"] + 1
    if config.get("attention_output_factor", 1.0) is None:
        config["attention_output_factor"] = 1.0
    if config.get("swa_rope_theta") is not None:
        share = {"partial_rotary_factor": config.get("partial_rotary_factor", 0.334)}
        config["rope_parameters"] = {
            "full_attention": {"rope_theta": config.get("rope_theta", 5e6), **share},
            "sliding_attention": {"rope_theta": config["swa_rope_theta"], **share},
        }


def _slides(fields: Fields, layers: int) -> list[bool]:
    return [i != 0 and (i + 1) % 6 != 0 for i in range(layers)]


def _caches(fields: Fields, windows: Sequence[int | None]) -> LayerCaches:
    heads = fields.count("num_attention_heads", MAX_WIDTH)
    kv_heads = fields.count("num_key_value_heads", MAX_WIDTH)
    slides = fields.count("swa_num_key_value_heads", heads, default=2 * kv_heads)
    width = fields.count("head_dim", _MAX_HEAD)
    values = fields.count("v_head_dim", width)
    counts = (kv_heads if window is None else slides for window in windows)
    return [AttentionCache(n, width, values, w) for n, w in zip(counts, windows, strict=True)]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """A file counts key heads for each layer; those of layers of one kind must be equal."""
    layers = config["num_hidden_layers"]
    kinds = keys.layer_types(layers, window=config["sliding_window"], period=6)
    each = config.pop("num_key_value_heads_per_layer")
    for kind, name in (
        ("full_attention", "num_key_value_heads"),
        ("sliding_attention", "swa_num_key_value_heads"),
    ):
        own = {count for count, one in zip(each, kinds, strict=True) if one == kind}
        if len(own) > 1:
            raise keys.fail("attention.head_count_kv", each, f"one number for all {kind} layers")
        if own:
            config[name] = own.pop()
    config["layer_types"] = kinds
    dense = [not keys.has_tensor(f"blk.{i}.ffn_gate_inp.weight") for i in range(layers)]
    config["mlp_layer_types"] = ["dense" if one else "sparse" for one in dense]
    config["norm_topk_prob"] = True  # llama.cpp's code has nothing else
    config["attention_output_factor"] = keys.number("attention.value_scale") or 1.0
    two_rotations(config, keys)


ARCHITECTURE = Architecture(
    "mimo_v2_flash",
    aliases=("mimo_v2",),
    layer=LayerRules(sinks="windows", route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(
            *(one for one in V3_KEYS if one != "n_shared_experts"),
            *("num_local_experts", "attention_bias", "layer_types", "mlp_layer_types"),
            *("sliding_window", "sliding_window_size", "v_head_dim", "attention_output_factor"),
            *("hybrid_layer_pattern", "moe_layer_freq", "swa_num_key_value_heads"),
            *("swa_rope_theta", "partial_rotary_factor", *_SAME),
        ),
        # of the layers after the last one: their tensors say that they are there
        ignored=("num_nextn_predict_layers", "num_mtp_layers"),
        fixed={
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        defaults={
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 129,
            "attention_output_factor": 0.707,
            "norm_topk_prob": True,
        },
        names={"attention_output_factor": "attention_value_scale"},
        derived=_derived,
        sliding=_slides,
        caches=_caches,
        expert_width="moe_intermediate_size",
        biases=biases,
    ),
    tensors=TensorRules(names={"self_attn.sinks": "self_attn.attention_sink_bias"}, qkv_by_rank=0),
    more_gguf=(
        GgufRules(
            "mimo2",
            tensors={"self_attn.sinks": "attn_sinks"},
            read=_read_gguf,
            expert_gating=2,
            keys=(
                *(PATTERN, "rope.freq_base_swa", "attention.value_scale", "nextn_predict_layers"),
            ),
        ),
    ),
)
