"""Falcon: attention and MLP side by side, with one key/value head (7B) or a few (40B, 11B).

Almazrouei et al., "The Falcon Series of Open Language Models" (2023), arXiv 2311.16867;
transformers' modeling_falcon.py. Falcon-RW has linear biases of attention. Here they are exact;
transformers rounds them to bfloat16, which changes nothing up to 256 tokens if the number of heads
is a power of two, and its eager code adds them twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    Norms,
    TensorRules,
)
from sdk.models.configs.derived import every_head_has_keys, four_times_wide
from sdk.models.configs.fields import Fields
from sdk.models.configs.score_biases import Alibi
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _biases(fields: Fields) -> Biases:
    every = fields.flag("bias", default=False)
    return Biases(every, every, every)


def _alibi(fields: Fields) -> Alibi | None:
    return Alibi(scaled=True) if fields.flag("alibi", default=False) else None


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    return [fields.flag("alibi", default=False)] * len(windows)


def _derived(config: dict[str, Any]) -> None:
    kv_heads = config.get("num_kv_heads")
    every_head_has_keys(config)
    four_times_wide(config)
    grouped = config.get("new_decoder_architecture", False)
    if grouped:
        config["num_key_value_heads"] = kv_heads or config.get("num_attention_heads")
    elif config.get("multi_query", True):
        config["num_key_value_heads"] = 1
    if grouped and not config.get("parallel_attn", True):
        raise UnsupportedError(
            "config: parallel_attn: expected True with new_decoder_architecture, found False: "
            "transformers' falcon ignores it, others do not"
        )


def _parallel(fields: Fields) -> bool:
    return fields.flag("parallel_attn", default=True)


def _one_norm(fields: Fields) -> bool:
    """Falcon-7B and 11B; blocks of 40B have one norm each."""
    grouped = fields.flag("new_decoder_architecture", default=False)
    return not grouped or fields.values.get("num_ln_in_parallel_attn", 2) == 1


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Files state neither the activation nor which of the models it is."""
    config["hidden_act"] = "gelu"
    config["new_decoder_architecture"] = True
    config["num_kv_heads"] = config["num_key_value_heads"]
    config["num_ln_in_parallel_attn"] = 1 + _has_two_norms(keys)


def _has_two_norms(keys: GgufKeys) -> bool:
    return keys.has_tensor("blk.0.attn_norm_2.weight")


#: What llama.cpp has.
_WRITTEN = {"alibi": False, "bias": False, "parallel_attn": True}


def _writes_two_norms(config: Mapping[str, Any]) -> bool:
    return not _one_norm(Fields(config))


ARCHITECTURE = Architecture(
    "falcon",
    layer=LayerRules(norm=LAYER_NORM, parallel_norms=Norms(), gated=False),
    config=ConfigRules(
        keys=(
            *("alibi", "bias", "multi_query", "new_decoder_architecture"),
            *("num_kv_heads", "num_ln_in_parallel_attn", "parallel_attn"),
        ),
        ignored=("apply_residual_connection_post_layernorm",),
        defaults={"layer_norm_epsilon": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True},
        unrotated=_unrotated,
        biases=_biases,
        norm_eps="layer_norm_epsilon",
        names={"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"},
        derived=_derived,
        alibi=_alibi,
        parallel_blocks=_parallel,
        one_norm=_one_norm,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.h",
            "model.embed_tokens": "transformer.word_embeddings",
            "model.norm": "transformer.ln_f",
            "self_attn.qkv_proj": "self_attention.query_key_value",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
            "input_layernorm": ("input_layernorm", "ln_attn"),
            "post_attention_layernorm": ("post_attention_layernorm", "ln_mlp"),
        },
        qkv_by_group=True,
    ),
    gguf=GgufRules("falcon", read=_read_gguf, only=_WRITTEN),
    more_gguf=(
        GgufRules(
            "falcon",
            matches=_has_two_norms,
            tensors={"input_layernorm": "attn_norm_2", "post_attention_layernorm": "attn_norm"},
            read=_read_gguf,
            writes=_writes_two_norms,
            only=_WRITTEN,
        ),
    ),
)
