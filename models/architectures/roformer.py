"""RoFormer: a BERT whose heads turn in adjacent pairs in place of learned positions.

Su et al., "RoFormer" (2021), arXiv 2104.09864; transformers' modeling_roformer.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, EmbeddingRules, TensorRules
from sdk.models.architectures import bert, roberta

_NAMES = {
    **bert.tensor_names("roformer"),
    "model.embed_project": "roformer.embeddings_project",
    "model.embed_rotations": "roformer.encoder.embed_positions",
}
del _NAMES["model.embed_positions"]

ARCHITECTURE = Architecture(
    "roformer",
    layer=bert.LAYER._replace(adjacent_pairs=True),
    config=bert.ARCHITECTURE.config._replace(
        keys=("type_vocab_size", "embedding_size"),
        stated=("hidden_act", "type_vocab_size", "embedding_size"),
        unrotated=None,
        fixed={"rotary_value": False, "is_decoder": False},
    ),
    tensors=TensorRules(names=_NAMES),
    embedding=EmbeddingRules(norm=True, types=True, projected=True),
    head=roberta.HEAD._replace(activation="=hidden_act"),
)
