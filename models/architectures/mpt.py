"""MPT: linear biases of attention in place of positions, norms with a weight alone, no biases.

MosaicML (2023); transformers' modeling_mpt.py, whose steepest slope is always that of BLOOM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from sdk.models.architectures.bloom import alibi
from sdk.models.architectures.gpt2 import no_rotation
from sdk.models.configs.derived import every_head_has_keys, four_times_wide
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

#: What ``attn_config`` may say: the only value that is computed.
_ATTENTION = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "softmax_scale": None,
}


def _derived(config: dict[str, Any]) -> None:
    attention = config.get("attn_config") or {}
    for key, value in _ATTENTION.items():
        found = attention.get(key, value) if isinstance(attention, dict) else attention
        if found != value:
            raise UnsupportedError(
                f"config: attn_config: {key}: expected {value}, found {str(found)[:80]}: another "
                "value is not supported for mpt"
            )
    every_head_has_keys(config)
    config.pop("intermediate_size", None)
    four_times_wide(config)


def _no_biases(fields: Fields) -> Biases:
    return Biases()


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    most = keys.number("attention.max_alibi_bias", 0.0)
    if most != 8:
        raise UnsupportedError(
            f"{keys.source}: mpt.attention.max_alibi_bias: expected 8, found {most:g}: other "
            "linear biases, and learned positions in their place, are not supported"
        )


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    return {"attention.max_alibi_bias": 8.0}


ARCHITECTURE = Architecture(
    "mpt",
    layer=LayerRules(norm=NormKind(centred=True), gated=False),
    config=ConfigRules(
        keys=("attn_config",),
        ignored=(
            *("attn_pdrop", "emb_pdrop", "embedding_fraction", "init_device", "init_config"),
            *("norm_type", "learned_pos_emb", "tokenizer_name", "verbose", "fc_type", "ffn_config"),
        ),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        fixed={"expansion_ratio": 4, "logit_scale": None, "no_bias": True},
        activation=lambda fields: "gelu",
        unrotated=no_rotation,
        biases=_no_biases,
        norm_eps="layer_norm_epsilon",
        names={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
        },
        derived=_derived,
        alibi=alibi,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.blocks",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.norm_f",
            "self_attn.qkv_proj": "attn.Wqkv",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "ffn.up_proj",
            "mlp.down_proj": "ffn.down_proj",
            "input_layernorm": "norm_1",
            "post_attention_layernorm": "norm_2",
        },
    ),
    gguf=GgufRules("mpt", read=_read_gguf, write=_write_gguf, keys=("attention.max_alibi_bias",)),
)
