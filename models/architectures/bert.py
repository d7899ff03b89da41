"""BERT: norms of the sums after each block, learned positions, token types; attention both ways.

Devlin et al., "BERT" (2018), arXiv 1810.04805; transformers' modeling_bert.py. MiniLM, bge, e5, gte
and most other small embedding models are BERTs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    Norms,
    TensorRules,
)
from sdk.models.configs.derived import every_head_has_keys
from sdk.models.configs.head_rules import HeadRules

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sdk.models.configs.fields import Fields

#: The norms of sums.
NORMS = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
LAYER = LayerRules(norms=NORMS, norm=LAYER_NORM, gated=False, post_norm=True)
#: Keys of training and of heads.
IGNORED = ("attention_probs_dropout_prob", "hidden_dropout_prob", "classifier_dropout")


def tensor_names(model: str) -> Mapping[str, str]:
    """The names of the tensors of a BERT, ours to the files', whose model is called ``model``."""
    return {
        "model.layers": f"{model}.encoder.layer",
        "model.embed_tokens": f"{model}.embeddings.word_embeddings",
        "model.embed_positions": f"{model}.embeddings.position_embeddings",
        "model.embed_types": f"{model}.embeddings.token_type_embeddings",
        "model.embed_norm": f"{model}.embeddings.LayerNorm",
        "self_attn.q_proj": "attention.self.query",
        "self_attn.k_proj": "attention.self.key",
        "self_attn.v_proj": "attention.self.value",
        "self_attn.o_proj": "attention.output.dense",
        "mlp.up_proj": "intermediate.dense",
        "mlp.down_proj": "output.dense",
        "post_attention_layernorm": "attention.output.LayerNorm",
        "post_feedforward_layernorm": "output.LayerNorm",
    }


def all_biases(fields: Fields) -> Biases:
    return Biases(True, True, True)


def no_rotation(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    return [True] * len(windows)


def derived(config: dict[str, Any]) -> None:
    """What a config of an encoder does not say: it has no head to tie, and no rotation."""
    every_head_has_keys(config)
    config["tie_word_embeddings"] = True
    config.setdefault("rope_theta", 10000.0)
    config.setdefault("eos_token_id", None)


def read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu"


#: The names of norms in GGUF files, also of other encoders.
GGUF_TENSORS = {
    "post_attention_layernorm": "attn_output_norm",
    "post_feedforward_layernorm": "layer_output_norm",
}

HEAD = HeadRules(
    ("bert.pooler.dense", "pooler.dense"),
    gguf_untyped="ReLU",  # files of DistilBERT, which call it a BERT
)

ARCHITECTURE = Architecture(
    "bert",
    layer=LAYER,
    config=ConfigRules(
        keys=("type_vocab_size",),
        ignored=IGNORED,
        defaults={"hidden_act": "gelu", "type_vocab_size": 2, "layer_norm_eps": 1e-12},
        stated=("hidden_act", "type_vocab_size"),
        unrotated=no_rotation,
        fixed={"position_embedding_type": "absolute", "is_decoder": False},
        biases=all_biases,
        causal=False,
        norm_eps="layer_norm_eps",
        derived=derived,
    ),
    tensors=TensorRules(names=tensor_names("bert")),
    gguf=GgufRules("bert", tensors=GGUF_TENSORS, read=read_gguf),
    embedding=EmbeddingRules(positions=0, norm=True, types=True),
    head=HEAD,
)
