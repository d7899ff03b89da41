"""BLOOM: linear biases of attention in place of positions, and a norm of the embeddings.

BigScience, "BLOOM" (2022), arXiv 2211.05100; transformers' modeling_bloom.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    ConfigRules,
    EmbeddingRules,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.gpt2 import all_biases, no_rotation
from sdk.models.configs.derived import every_head_has_keys, four_times_wide
from sdk.models.configs.score_biases import Alibi

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

#: Tokens of the training's sequences, where a config does not say: attention has no limit.
_CONTEXT = 2048


def alibi(fields: Fields) -> Alibi:
    return Alibi()


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    config.pop("intermediate_size", None)
    four_times_wide(config)
    if config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = _CONTEXT


ARCHITECTURE = Architecture(
    "bloom",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        ignored=(
            *("slow_but_exact", "attention_softmax_in_fp32"),
            *("bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi", "skip_bias_add"),
            *("skip_bias_add_qkv", "n_inner"),
        ),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        activation=lambda fields: "gelu_tanh",
        fixed={"apply_residual_connection_post_layernorm": False},
        unrotated=no_rotation,
        biases=all_biases,
        norm_eps="layer_norm_epsilon",
        names={
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "seq_length",
        },
        derived=_derived,
        alibi=alibi,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.h",
            "model.embed_tokens": "transformer.word_embeddings",
            "model.embed_norm": "transformer.word_embeddings_layernorm",
            "model.norm": "transformer.ln_f",
            "self_attn.qkv_proj": "self_attention.query_key_value",
            "self_attn.o_proj": "self_attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        qkv_by_group=True,
    ),
    gguf=GgufRules("bloom"),
    embedding=EmbeddingRules(norm=True),
)
