"""Nemotron-H, Nemotron Nano 2 and 3: a layer is Mamba-2, attention without rotation, an MLP of
relu^2, or experts of such MLPs, which may read fewer features than the model has.

NVIDIA, "Nemotron-H" (2025), arXiv 2504.03624; transformers' modeling_nemotron_h.py, except for the
limits of time steps: as in the models' own code they are ``time_step_limit`` for every token, where
transformers clamps those of prompts to ``time_step_min``.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    Norms,
    TensorRules,
)
from sdk.models.architectures.glm4_moe import V3_ROUTE
from sdk.models.architectures.mamba2 import (
    GGUF_KEYS,
    GGUF_TENSORS,
    IGNORED,
    MIXER_NAMES,
    NAMES,
    SIZES,
    read_sizes,
    spec_of,
)
from sdk.models.configs.experts import some_experts
from sdk.models.configs.fields import Fields
from sdk.models.mixers.mamba2 import Mamba2Spec

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
#: The letters of ``hybrid_override_pattern``, and older names of kinds.
_NAMES = {
    "M": _MAMBA,
    "*": _ATTENTION,
    "-": _MLP,
    "E": _EXPERTS,
    "mamba": _MAMBA,
    "attention": _ATTENTION,
}
_ONE_NORM = "input_layernorm"
_PARTS = ("up_proj", "down_proj")


def _derived(config: dict[str, Any]) -> None:
    """The kinds of layers and their number, in whichever way a config says them."""
    kinds = config.get("layer_types") or config.get("hybrid_override_pattern")
    if not isinstance(kinds, (list, tuple, str)):
        kinds = [_MAMBA, _EXPERTS, _ATTENTION, _MLP]
    kinds = [_NAMES.get(kind, kind) for kind in kinds]
    config["layer_types"], config["num_hidden_layers"] = kinds, len(kinds)
    config["mlp_layer_types"] = ["sparse" if one == _EXPERTS else "dense" for one in kinds]
    if _EXPERTS not in kinds:
        config["n_routed_experts"] = 0


def _recurrent(fields: Fields) -> Mamba2Spec:
    bias = fields.flag("use_bias", default=False)
    return spec_of(fields, in_bias=bias, out_bias=bias)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """A layer with key/value heads attends, one with an MLP's width is that, others are Mamba-2."""
    read_sizes(config, keys)
    layers = config["num_hidden_layers"]
    attends = keys.present("attention.head_count_kv", layers)
    wide = keys.present("feed_forward_length", layers)
    block = _EXPERTS if keys.expert_count else _MLP
    config["layer_types"] = [
        _ATTENTION if attend else block if mlp else _MAMBA
        for attend, mlp in zip(attends, wide, strict=True)
    ]
    config["hidden_act"] = "relu2"
    if latent := keys.integer("moe_latent_size", (0, 1 << 20), 0):
        config["moe_latent_size"] = latent


_GGUF = GgufRules(
    "nemotron_h",
    tensors={**GGUF_TENSORS, "mlp.latent_in": "ffn_latent_down", "mlp.latent_out": "ffn_latent_up"},
    read=_read_gguf,
    expert_gating=2,
    keys=(
        *(*GGUF_KEYS, "rope.scaling.finetuned", "nextn_predict_layers", "moe_latent_size"),
        *("expert_shared_count", "attention.layer_norm_epsilon"),
    ),
)

ARCHITECTURE = Architecture(
    "nemotron_h",
    layer=LayerRules(
        norms=Norms(before_attention=_ONE_NORM, before_mlp=_ONE_NORM),
        gated=False,
        route=V3_ROUTE,
        route_bias=True,
    ),
    config=ConfigRules(
        keys=(
            *("layer_types", "mlp_bias", "use_bias", "time_step_limit", "n_routed_experts"),
            *("num_experts_per_tok", "moe_intermediate_size", "moe_latent_size"),
            *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob"),
            *("n_group", "topk_group", "mlp_layer_types", *SIZES.values()),
        ),
        ignored=(
            *(
                *IGNORED,
                "expand",
                "hybrid_override_pattern",
                "num_logits_to_keep",
                "mtp_layers_block_type",
            ),
            *("use_mamba_kernels", "mamba_hidden_act", "mamba_ssm_cache_dtype", "n_shared_experts"),
            *("num_nextn_predict_layers", "moe_shared_expert_overlap", "mamba_proj_bias"),
            *("attention_bias", "mamba_expand", "num_local_experts", "sliding_window"),
            "mtp_hybrid_override_pattern",
        ),
        defaults={
            "hidden_act": "relu2",
            "mamba_n_groups": 8,
            "mamba_d_conv": 4,
            "mamba_d_state": 128,
        },
        norm_eps="layer_norm_epsilon",
        names={
            "layer_types": "layers_block_type",
            "hidden_act": "mlp_hidden_act",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
        },
        derived=_derived,
        biases=lambda fields: Biases(mlp=fields.flag("mlp_bias", default=False)),
        unrotated=lambda fields, windows: [True] * len(windows),
        expert_width="moe_intermediate_size",
        has_experts=some_experts,
        dense_width="intermediate_size",
        kinds={
            _MAMBA: Blocks(attention=False, recurrent=True, mlp=False),
            _ATTENTION: Blocks(mlp=False),
            _MLP: Blocks(attention=False),
            _EXPERTS: Blocks(attention=False),
        },
        recurrent=_recurrent,
    ),
    tensors=TensorRules(
        names={
            **NAMES,
            **MIXER_NAMES,
            **{f"self_attn.{x}_proj": f"mixer.{x}_proj" for x in "qkvo"},
            **{f"mlp.{part}": f"mixer.{part}" for part in (*_PARTS, "gate", "experts")},
            "mlp.shared_experts": "mixer.shared_experts",
            "mlp.latent_in": "mixer.fc1_latent_proj",
            "mlp.latent_out": "mixer.fc2_latent_proj",
        }
    ),
    more_gguf=(_GGUF, _GGUF._replace(name="nemotron_h_moe")),
)
