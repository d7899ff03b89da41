"""The slopes of attention with linear biases (Press et al. 2021, arXiv 2108.12409)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sdk.models.configs.score_biases import Alibi


def alibi_slopes(alibi: Alibi, heads: int, scale: float) -> NDArray[np.float32]:
    """One slope for each head, float32 ``[heads]``; ``scale``: that of attention.

    With n heads, a power of two, head i has ``2^(-most (i + 1) / n)``. With other numbers the first
    heads are those of the power of two below, the others every second one of the power above.
    """
    below = 1 << (heads.bit_length() - 1)
    first = np.arange(1, below + 1) / below
    rest = np.arange(1, 2 * (heads - below), 2) / (2 * below)
    slopes = np.exp2(-alibi.most * np.concatenate([first, rest]))
    return (slopes * (scale if alibi.scaled else 1.0)).astype(np.float32)
