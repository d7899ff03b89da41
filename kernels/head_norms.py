"""The norms of queries and keys that come before rotation (Qwen 3, Gemma 3).

torch is imported for type checkers only: models import this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.kernels.dataclass import dataclass

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorms over each head's query and key: weights float32 ``[head_dim]``."""

    q: Tensor
    k: Tensor
    eps: float
