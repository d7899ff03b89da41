"""The norms of a model, as values that operators take.

torch is imported for type checkers only: models import this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.kernels.dataclass import dataclass

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension of ``width`` features, computed in float32.

    ``(x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias``; the mean is 0 unless it is
    ``centred``: without it this is RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467), with it
    LayerNorm (Ba et al. 2016, arXiv 1607.06450).

    ``weight``, ``bias``: float32 ``[width]``, or ``None`` for 1 and 0. A weight ``[heads, width]``
    is for rows ``[T, heads, width]``: each head has its own.
    """

    weight: Tensor | None
    eps: float
    bias: Tensor | None = None
    centred: bool = False

    @property
    def form(self) -> str:
        """What of it a kernel may be compiled for, in words; empty for a plain RMSNorm."""
        words = []
        if self.centred:
            words.append("centred")
        if self.weight is None:
            words.append("unweighted")
        elif self.weight.dim() == 2:
            words.append("heads")
        if self.bias is not None:
            words.append("bias")
        return " ".join(words)
