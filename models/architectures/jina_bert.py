"""Jina Embeddings v2: a BERT with symmetric linear biases of attention and a gated MLP.

Günther et al. (2023), arXiv 2310.19923. transformers has no such class: the files are BERTs by
their config, and bring their own code. The facts are those of that code and of llama.cpp.
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
    TensorRules,
)
from sdk.models.architectures import bert
from sdk.models.configs.fields import activation_named
from sdk.models.configs.head_rules import HeadRules
from sdk.models.configs.score_biases import Alibi
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sdk.kernels.operators.mlp_activations import Activation
    from sdk.models.configs.fields import Fields

#: What ``feed_forward_type`` says: the activation of the gate. Without gates it is another model.
_ACTIVATIONS = {"geglu": "gelu", "reglu": "relu"}
#: In the name of the code of jina-embeddings-v2-base-code, whose layers differ.
_CODE = "qk-post-norm"
KEYS = ("type_vocab_size", "feed_forward_type")
IGNORED = (*bert.IGNORED, "emb_pooler", "model_max_length")


def is_jina(config: Mapping[str, Any], *, code: bool = False) -> bool:
    """Whether a config is one of these that calls itself a BERT; ``code``: the one for code."""
    alibi = config.get("model_type") == "bert" and config.get("position_embedding_type") == "alibi"
    return alibi and code == (_CODE in f"{config.get('auto_map')} {config.get('_name_or_path')}")


def _claims(config: Mapping[str, Any]) -> bool:
    return is_jina(config)


def activation(fields: Fields) -> Activation:
    kind = fields.text("feed_forward_type", default="geglu")
    if kind not in _ACTIVATIONS:
        raise UnsupportedError(
            f"config: feed_forward_type: expected geglu or reglu, found {kind[:80]!r}: an MLP "
            "without gates is not supported for jina_bert"
        )
    return activation_named(_ACTIVATIONS[kind], "feed_forward_type")


def biases(fields: Fields) -> Biases:
    return Biases(qkv=True, output=True, down=True)


def linear_biases(fields: Fields) -> Alibi:
    return Alibi()


def has_gate(keys: GgufKeys) -> bool:
    """Whether a file holds gate and up apart, as those of 2024 do."""
    return keys.has_tensor("blk.0.ffn_gate.weight")


def _has_no_norms(keys: GgufKeys) -> bool:
    return has_gate(keys) and not keys.has_tensor("blk.0.attn_q_norm.weight")


CONFIG = ConfigRules(
    keys=KEYS,
    ignored=IGNORED,
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12},
    stated=("type_vocab_size",),
    unrotated=bert.no_rotation,
    fixed={"position_embedding_type": "alibi", "is_decoder": False},
    activation=activation,
    biases=biases,
    causal=False,
    norm_eps="layer_norm_eps",
    derived=bert.derived,
    alibi=linear_biases,
)
NAMES = {
    **bert.tensor_names("bert"),
    "mlp.gate_up_proj": "mlp.gated_layers",
    "mlp.down_proj": "mlp.wo",
    "post_feedforward_layernorm": "mlp.layernorm",
}
NAMES.pop("mlp.up_proj")

ARCHITECTURE = Architecture(
    "jina_bert",
    layer=LayerRules(norms=bert.NORMS, norm=LAYER_NORM, post_norm=True),
    config=CONFIG,
    gguf=GgufRules("jina-bert-v2", tensors={**bert.GGUF_TENSORS, "mlp.gate_up_proj": "ffn_up"}),
    more_gguf=(GgufRules("jina-bert-v2", matches=_has_no_norms, tensors=bert.GGUF_TENSORS),),
    tensors=TensorRules(names=NAMES),
    embedding=EmbeddingRules(norm=True, types=True),
    head=HeadRules(("bert.pooler.dense", "pooler.dense")),
    claims=_claims,
)
