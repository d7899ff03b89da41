"""ELECTRA's discriminator: a BERT whose embeddings may be narrower than its layers.

Clark et al., "ELECTRA" (2020), arXiv 2003.10555; transformers' modeling_electra.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, EmbeddingRules, TensorRules
from sdk.models.architectures import bert, roberta

ARCHITECTURE = Architecture(
    "electra",
    layer=bert.LAYER,
    config=bert.ARCHITECTURE.config._replace(
        keys=("type_vocab_size", "embedding_size"),
        ignored=(
            *bert.IGNORED,
            *("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout"),
        ),
        stated=("hidden_act", "type_vocab_size", "embedding_size"),
    ),
    tensors=TensorRules(
        names={
            **bert.tensor_names("electra"),
            "model.embed_project": "electra.embeddings_project",
        }
    ),
    embedding=EmbeddingRules(positions=0, norm=True, types=True, projected=True),
    head=roberta.HEAD._replace(activation="GELU"),
)
