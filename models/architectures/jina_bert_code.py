"""jina-embeddings-v2-base-code: Jina's v2 with norms of queries and keys, and one more per block.

The norm after attention is followed by one of the sum of it and what attention read. As with v2,
the facts are those of the files' own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures import bert, jina_bert
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping


def _claims(config: Mapping[str, Any]) -> bool:
    return jina_bert.is_jina(config, code=True)


def _has_norms(keys: GgufKeys) -> bool:
    return keys.has_tensor("blk.0.attn_q_norm.weight")


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    if not jina_bert.has_gate(keys):
        raise UnsupportedError(
            f"{keys.source}: blk.0.ffn_up.weight: expected one tensor for gate and one for up, "
            "found both in one: this model has up first, and llama.cpp computes as if gate were "
            "first. Use the model's folder"
        )


ARCHITECTURE = Architecture(
    "jina_bert_code",
    layer=LayerRules(
        norms=bert.NORMS._replace(before_mlp="layer_norm_1"),
        qk_norm="width",
        norm=LAYER_NORM,
        post_norm=True,
    ),
    config=jina_bert.CONFIG,
    gguf=GgufRules(
        "jina-bert-v2",
        matches=_has_norms,
        tensors={**bert.GGUF_TENSORS, "layer_norm_1": "attn_norm_2"},
        read=_read_gguf,
    ),
    tensors=TensorRules(
        names={
            **jina_bert.NAMES,
            "self_attn.q_norm": "attention.self.layer_norm_q",
            "self_attn.k_norm": "attention.self.layer_norm_k",
            "layer_norm_1": "layer_norm_1",
            "mlp.gate_up_proj": "mlp.up_gated_layer",
            "mlp.down_proj": "mlp.down_layer",
            "post_feedforward_layernorm": "layer_norm_2",
        },
        up_before_gate=True,
    ),
    embedding=EmbeddingRules(norm=True, types=True),
    claims=_claims,
)
