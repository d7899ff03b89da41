"""Kimi Linear: Kimi delta attention, and latent attention without a rotation in some layers.

Its router and experts are DeepSeek V3's. Kimi Team, "Kimi Linear" (2025), arXiv 2510.26692;
transformers' modeling_kimi_linear.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    RECURRENT,
    Architecture,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.architectures.glm4_moe import V3_ROUTE
from sdk.models.configs.fields import MAX_LAYERS, MAX_WIDTH, Fields
from sdk.models.configs.latent import LATENT_GGUF_KEYS, LATENT_KEYS, latent_of, read_latent
from sdk.models.configs.latent_spec import LatentSpec
from sdk.models.mixers.kimi_delta import KimiDeltaSpec

_MOST_TAPS = 16
_LINEAR, _FULL = "linear_attention", "full_attention"
#: Names in GGUF files of what layers of attention do not have.
_DELTA = {
    **{f"{name}_conv1d": f"ssm_conv1d_{name}" for name in "qkv"},
    **{f"{name}_{part}_proj": f"ssm_{name}_{part}" for name in "fg" for part in "ab"},
    "b_proj": "ssm_beta",
    "A": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "o_norm": "ssm_norm",
}


def _derived(config: dict[str, Any]) -> None:
    """What published configs say in ``linear_attn_config``, and transformers' class in keys of its
    own. The layers in the former are counted from 1."""
    own, layers = config.get("linear_attn_config"), config.get("num_hidden_layers")
    if isinstance(own, dict):
        sizes = Fields(own, "config: linear_attn_config")
        for ours, theirs, most in (
            ("linear_head_dim", "head_dim", 512),
            ("linear_num_heads", "num_heads", MAX_WIDTH),
            ("linear_conv_kernel_dim", "short_conv_kernel_size", _MOST_TAPS),
        ):
            config[ours] = sizes.count(theirs, most)
    if config.get("layer_types") is not None or not isinstance(layers, int):
        return
    every = range(layers)
    full: Any = [i + 1 for i in every if i and i % 4 == 0]
    if isinstance(own, dict):
        full, delta = own.get("full_attn_layers"), own.get("kda_layers")
        both = [*full, *delta] if isinstance(full, list) and isinstance(delta, list) else []
        if sorted(map(repr, both)) != sorted(repr(i + 1) for i in every):
            expected = f"each of the layers 1 to {layers} once in full_attn_layers or kda_layers"
            Fields(config).fail("linear_attn_config", expected, own)
    config["layer_types"] = [_FULL if i + 1 in full else _LINEAR for i in every]


def _recurrent(fields: Fields) -> KimiDeltaSpec:
    taps = fields.count("linear_conv_kernel_dim", _MOST_TAPS)
    if taps < 2:
        fields.fail("linear_conv_kernel_dim", "at least 2 tokens", taps)
    heads, dim = fields.count("linear_num_heads", MAX_WIDTH), fields.count("linear_head_dim", 512)
    return KimiDeltaSpec(heads, dim, taps)


def _latent(fields: Fields) -> LatentSpec:
    """Without a rotation the order of features does not matter."""
    return latent_of(fields)._replace(adjacent_pairs=False)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Layers without heads of keys have delta attention."""
    layers = config["num_hidden_layers"]
    attends = keys.present("attention.head_count_kv", layers)
    config["layer_types"] = [_FULL if one else _LINEAR for one in attends]
    read_latent(config, keys)
    config["linear_num_heads"] = config["num_attention_heads"]
    config["linear_head_dim"] = keys.integer("kda.head_dim", (1, 512))
    config["linear_conv_kernel_dim"] = keys.integer("ssm.conv_kernel", (2, _MOST_TAPS))
    config["num_expert_group"] = config["topk_group"] = 1
    config["moe_renormalize"] = True
    config["first_k_dense_replace"] = keys.integer("leading_dense_block_count", (0, MAX_LAYERS), 0)


ARCHITECTURE = Architecture(
    "kimi_linear",
    layer=LayerRules(route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(
            *(key for key in LATENT_KEYS if key not in ("rope_interleave", "attention_bias")),
            *("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"),
            *("linear_attn_config", "layer_types", "mlp_layer_types", "first_k_dense_replace"),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"),
            *("norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"),
        ),
        # names of the one way to do a thing
        ignored=(
            *("moe_layer_freq", "use_grouped_topk", "qk_head_dim", "num_nextn_predict_layers"),
            "output_router_logits",
        ),
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.446,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4,
            "v_head_dim": 128,
            "max_position_embeddings": 1048576,
        },
        fixed={
            "hidden_act": "silu",
            "attention_bias": False,
            "mla_use_nope": True,
            "moe_router_activation_func": "sigmoid",
        },
        names={
            "max_position_embeddings": "model_max_length",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
            "num_experts_per_tok": "num_experts_per_token",
            "num_experts": "num_local_experts",
            "num_shared_experts": "n_shared_experts",
        },
        derived=_derived,
        unrotated=lambda fields, windows: [True] * len(windows),
        expert_width="moe_intermediate_size",
        kinds={_LINEAR: RECURRENT, _FULL: Blocks()},
        recurrent=_recurrent,
        latent=_latent,
    ),
    gguf=GgufRules(
        "kimi-linear",
        tensors={f"self_attn.{name}": theirs for name, theirs in _DELTA.items()},
        read=_read_gguf,
        expert_gating=2,
        keys=(*LATENT_GGUF_KEYS, "kda.head_dim", "ssm.conv_kernel"),
    ),
)
