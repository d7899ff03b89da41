"""Adapters of a table of token types with one row, as those of Jina Embeddings v3 have.

Every token gets that row, so an update of it is one of every row of the embedding: one more factor
of its update, or of rank 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.lazy_torch import torch
from sdk.loaders.adapters.adapter_file import MatrixShape, StoredMatrix
from sdk.models.architecture import architecture
from sdk.quant.adapter import LowRank

EMBEDDING, TYPES = "model.embed_tokens", "model.embed_types"


def with_one_type(
    config: Mapping[str, Any], matrices: Mapping[str, tuple[int, int]]
) -> Mapping[str, tuple[int, int]]:
    """The matrices that an adapter may change, with the table of token types if it has one row."""
    own = architecture(config.get("model_type"))
    types = own is not None and own.embedding.types and config.get("type_vocab_size") == 1
    if not types or EMBEDDING not in matrices:
        return matrices
    return {**matrices, TYPES: (1, matrices[EMBEDDING][1])}


def in_the_embedding(
    matrices: Mapping[str, StoredMatrix], vocab: int
) -> Mapping[str, StoredMatrix]:
    """The updates with that of the token type in that of the embedding."""
    types = matrices.get(TYPES)
    if types is None:
        return matrices
    tokens = matrices.get(EMBEDDING)
    width = types.shape.inputs
    rank = 1 + (0 if tokens is None else tokens.shape.rank)

    def read() -> LowRank:
        one = types.read()
        rows, every = one.b.float() @ one.a.float(), torch.ones(vocab, 1)
        if tokens is None:
            return LowRank(rows, every)
        own = tokens.read()
        return LowRank(torch.cat([own.a.float(), rows]), torch.cat([own.b.float(), every], dim=1))

    rest = {path: stored for path, stored in matrices.items() if path != TYPES}
    return {**rest, EMBEDDING: StoredMatrix(MatrixShape(rank, width, vocab), read)}
