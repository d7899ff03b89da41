"""MPNet: a BERT without token types whose attention has biases by the distance of a key.

Song et al., "MPNet" (2020), arXiv 2004.09297; transformers' modeling_mpnet.py. all-mpnet-base-v2 is
one. llama.cpp has no such model, so there are no GGUF files.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, EmbeddingRules, TensorRules
from sdk.models.architectures import bert, roberta
from sdk.models.configs.score_biases import DistanceBuckets


def _derived(config: dict[str, Any]) -> None:
    bert.derived(config)
    config["pad_token_id"] = 1  # the code fixes the row after which positions begin


ARCHITECTURE = Architecture(
    "mpnet",
    layer=bert.LAYER,
    config=bert.ARCHITECTURE.config._replace(
        keys=("pad_token_id",),
        defaults={"hidden_act": "gelu", "layer_norm_eps": 1e-12},
        stated=("hidden_act",),
        fixed={"relative_attention_num_buckets": 32},  # the code has no other number
        derived=_derived,
        buckets=lambda fields: DistanceBuckets(32, 128),
    ),
    tensors=TensorRules(
        names={
            "model.layers": "mpnet.encoder.layer",
            "model.embed_tokens": "mpnet.embeddings.word_embeddings",
            "model.embed_positions": "mpnet.embeddings.position_embeddings",
            "model.embed_norm": "mpnet.embeddings.LayerNorm",
            "model.distance_biases": "mpnet.encoder.relative_attention_bias",
            "self_attn.q_proj": "attention.attn.q",
            "self_attn.k_proj": "attention.attn.k",
            "self_attn.v_proj": "attention.attn.v",
            "self_attn.o_proj": "attention.attn.o",
            "mlp.up_proj": "intermediate.dense",
            "mlp.down_proj": "output.dense",
            "post_attention_layernorm": "attention.LayerNorm",
            "post_feedforward_layernorm": "output.LayerNorm",
        }
    ),
    embedding=EmbeddingRules(positions="after padding", norm=True),
    head=roberta.HEAD,
)
