"""XLM-RoBERTa in Jina's own code: the same model with other names (jina-reranker-v2).

The facts are those of the files' code. With rotary embeddings it is Jina Embeddings v3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, EmbeddingRules, TensorRules
from sdk.models.architectures import bert, jina_embeddings_v3, roberta

if TYPE_CHECKING:
    from collections.abc import Mapping


def _claims(config: Mapping[str, Any]) -> bool:
    theirs = config.get("model_type") == "xlm-roberta" and "Flash" in str(config.get("auto_map"))
    return theirs and config.get("position_embedding_type", "absolute") == "absolute"


ARCHITECTURE = Architecture(
    "xlm_roberta_flash",
    layer=bert.LAYER,
    config=roberta.ARCHITECTURE.config._replace(
        ignored=(
            *bert.IGNORED,
            *("emb_pooler", "use_flash_attn", "use_reg_tokens", "truncate_dim"),
            *("load_trained_adapters", "matryoshka_dimensions", "truncation"),
        ),
    ),
    tensors=TensorRules(
        names={
            **jina_embeddings_v3.ARCHITECTURE.tensors.names,
            "model.embed_positions": "roberta.embeddings.position_embeddings",
        }
    ),
    embedding=EmbeddingRules(positions="after padding", norm=True, types=True),
    head=roberta.HEAD,
    claims=_claims,
)
