"""DBRX: norms of LayerNorm without a bias, clamped queries, keys and values, and 16 experts.

Databricks (2024); transformers' modeling_dbrx.py. Weights of the chosen experts sum to 1.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    NormKind,
    TensorRules,
)
from sdk.quant.errors import UnsupportedError

#: Keys of ``attn_config`` and of ``ffn_config``, theirs to ours.
_ATTENTION = {
    "kv_n_heads": "num_key_value_heads",
    "clip_qkv": "clip_qkv",
    "rope_theta": "rope_theta",
}
_EXPERTS = {
    "ffn_hidden_size": "intermediate_size",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
}


def _derived(config: dict[str, Any]) -> None:
    for part, names in (("attn_config", _ATTENTION), ("ffn_config", _EXPERTS)):
        own = config.get(part)
        if isinstance(own, dict):
            config.update({ours: own[theirs] for theirs, ours in names.items() if theirs in own})
            if "rope_theta" in own:  # transformers 5 adds its default beside it
                config.pop("rope_parameters", None)
    experts = config.get("ffn_config")
    if not isinstance(experts, dict):
        return
    power = experts.get("moe_normalize_expert_weights", 1.0)
    activation = (experts.get("ffn_act_fn") or {}).get("name", "silu")
    for key, wanted, found in (
        ("moe_normalize_expert_weights", 1, power),
        ("ffn_act_fn.name", "silu", activation),
    ):
        if found != wanted:
            raise UnsupportedError(
                f"config: ffn_config.{key}: expected {wanted}, found {str(found)[:40]}: another "
                "value is not supported for dbrx"
            )


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["clip_qkv"] = keys.number("attention.clamp_kqv") or None


ARCHITECTURE = Architecture(
    "dbrx",
    layer=LayerRules(norm=NormKind(centred=True)),
    config=ConfigRules(
        keys=(
            *("clip_qkv", "num_experts", "num_experts_per_tok", "attn_config", "ffn_config"),
            # inside these two
            *("kv_n_heads", "ffn_act_fn", "ffn_hidden_size", "moe_num_experts", "moe_top_k"),
            "moe_normalize_expert_weights",
        ),
        ignored=("emb_pdrop", "moe_jitter_eps", "moe_loss_weight"),
        activation=lambda fields: "silu",
        biases=lambda fields: Biases(),
        norm_eps=1e-5,  # torch's default
        names={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
        derived=_derived,
        expert_width="intermediate_size",
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.blocks",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.norm_f",
            "self_attn.qkv_proj": "norm_attn_norm.attn.Wqkv",
            "self_attn.o_proj": "norm_attn_norm.attn.out_proj",
            "input_layernorm": "norm_attn_norm.norm_1",
            "post_attention_layernorm": "norm_attn_norm.norm_2",
            "mlp.gate": "ffn.router.layer",
            "mlp.experts.gate_proj": "ffn.experts.mlp.w1",
            "mlp.experts.up_proj": "ffn.experts.mlp.v1",
            "mlp.experts.down_proj": "ffn.experts.mlp.w2",
        },
        experts_by_rows=True,
    ),
    more_gguf=(
        GgufRules(
            "dbrx",
            tensors={"post_attention_layernorm": "attn_output_norm"},
            read=_read_gguf,
            keys=("attention.clamp_kqv",),
        ),
    ),
)
