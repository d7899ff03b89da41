"""How alike two vectors, or two matrices of vectors, are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdk.quant.embedding_head import unit


def similarity(a: Sequence[float], b: Sequence[float], kind: str = "cosine") -> float:
    """``cosine``, ``dot``, or the negative distance ``euclidean`` or ``manhattan``; larger is more
    alike (sentence-transformers' names)."""
    if kind == "cosine":
        a, b = unit(a), unit(b)
    if kind in ("cosine", "dot"):
        return sum(x * y for x, y in zip(a, b, strict=True))
    difference = np.asarray(a, np.float64) - np.asarray(b, np.float64)
    if kind == "euclidean":
        return -float(np.sqrt(np.square(difference).sum()))
    return -float(np.abs(difference).sum())


def max_similarity(query: Any, document: Any) -> float:
    """Late interaction (ColBERT): the sum over a query's vectors ``[n, width]`` of the product with
    the best one of a document's ``[m, width]``."""
    products = np.asarray(query, np.float64) @ np.asarray(document, np.float64).T
    return float(products.max(1).sum())
