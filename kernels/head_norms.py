"""The norms of queries and keys that come before rotation (Qwen 3, Gemma 3).

torch is imported for type checkers only: models import this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class HeadNorms(NamedTuple):
    """RMSNorms over each head's query and key: weights float32 ``[head_dim]``."""

    q: Tensor
    k: Tensor
    eps: float
