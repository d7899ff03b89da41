"""Qwen 3-Next: gated delta nets, every fourth layer attention with a gate, and many experts.

The projections of a delta net lie by heads of keys in folders, norms are stored minus 1.
transformers' modeling_qwen3_next.py.
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
    NextTokenRules,
    OutputGate,
    TensorRules,
)
from sdk.models.configs.fields import MAX_LAYERS, MAX_WIDTH, Fields
from sdk.models.mixers.gated_delta_net import GatedDeltaSpec

#: Keys of delta nets, and of which layers have one.
KEYS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "layer_types", "partial_rotary_factor"),
    *("attention_bias", "full_attention_interval", "value_heads_tiled"),
)
#: Keys of next-token heads, and notes of published configs.
IGNORED = (
    *("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype"),
    *("mtp_layer_types", "attn_output_gate"),
)
EXPERT_KEYS = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    "shared_expert_intermediate_size",
)
DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
KINDS = {"linear_attention": RECURRENT, "full_attention": Blocks()}
LAYER = LayerRules(
    qk_norm="head", shared_gate=True, output_gate=OutputGate("q_proj", with_queries=True)
)
TENSORS = TensorRules(norms_minus_one=True, whole_norms=("linear_attn.norm",))
#: Names in GGUF files.
GGUF_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GGUF_KEYS = (
    *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count"),
    *("ssm.time_step_rank", "attention.recurrent_layers", "full_attention_interval"),
    "nextn_predict_layers",
)


def recurrent(fields: Fields) -> GatedDeltaSpec:
    """The sizes of its delta nets."""
    keys, values = (
        fields.count(f"linear_num_{side}_heads", MAX_WIDTH) for side in ("key", "value")
    )
    if values % keys:
        fields.fail("linear_num_value_heads", f"a multiple of {keys} heads of keys", values)
    taps = fields.count("linear_conv_kernel_dim", 16)
    if taps < 2:
        fields.fail("linear_conv_kernel_dim", "at least 2 tokens", taps)
    return GatedDeltaSpec(
        keys,
        values,
        fields.count("linear_key_head_dim", 512),
        fields.count("linear_value_head_dim", 4096),
        taps,
        tiled=fields.flag("value_heads_tiled", default=False),
    )


def derived(config: dict[str, Any]) -> None:
    """The kinds of layers, where a config does not list them."""
    layers = config.get("num_hidden_layers")
    if config.get("layer_types") is None and isinstance(layers, int):
        every = Fields(config).count("full_attention_interval", MAX_LAYERS, default=4)
        kinds = ("linear_attention", "full_attention")
        config["layer_types"] = [kinds[(i + 1) % every == 0] for i in range(layers)]


def read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Delta nets, also of models built on this one."""
    layers = config["num_hidden_layers"]
    flags = keys.flags("attention.recurrent_layers", layers)
    if flags is None:
        every = keys.integer("full_attention_interval", (1, MAX_LAYERS), 4)
        flags = [(i + 1) % every != 0 for i in range(layers)]
    config["layer_types"] = ["linear_attention" if one else "full_attention" for one in flags]
    values = keys.integer("ssm.time_step_rank", (1, MAX_WIDTH))
    inner = keys.integer("ssm.inner_size", (1, MAX_WIDTH))
    config["linear_num_value_heads"] = values
    config["linear_num_key_heads"] = keys.integer("ssm.group_count", (1, values))
    config["linear_key_head_dim"] = keys.integer("ssm.state_size", (1, 512))
    config["linear_value_head_dim"] = inner // values
    config["linear_conv_kernel_dim"] = keys.integer("ssm.conv_kernel", (2, 16))
    config["use_qk_norm"] = True
    config["norm_topk_prob"] = True


ARCHITECTURE = Architecture(
    "qwen3_next",
    layer=LAYER,
    config=ConfigRules(
        keys=(*KEYS, *EXPERT_KEYS, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
        ignored=IGNORED,
        defaults=DEFAULTS,
        fixed={"hidden_act": "silu"},
        derived=derived,
        expert_width="moe_intermediate_size",
        kinds=KINDS,
        recurrent=recurrent,
    ),
    tensors=TENSORS._replace(deltas_by_key_head=True),
    more_gguf=(
        GgufRules(
            "qwen3next",
            tensors={
                **GGUF_TENSORS,
                "linear_attn.in_proj_qkvz": "ssm_in",  # of the first files
                "linear_attn.in_proj_ba": "ssm_ba",
            },
            read=read_gguf,
            keys=GGUF_KEYS,
        ),
    ),
    next_token=NextTokenRules(),
)
