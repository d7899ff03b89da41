"""The learned numbers of the activation xIELU (Huang and Schlag 2024, arXiv 2411.13010)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from sdk.models.layers import Source


def xielu_numbers(source: Source, path: str) -> tuple[float, float, float, float]:
    """What the activation of an MLP takes: see :meth:`sdk.kernels.ops.Ops.activation`."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    alpha_p, alpha_n, beta, eps = (
        float(source.vector(f"{path}.act_fn.{name}", 1)[0]) for name in names
    )
    if not (eps <= 0 and all(map(math.isfinite, (alpha_p, alpha_n, beta, eps)))):
        found = f"alpha_p {alpha_p:g}, alpha_n {alpha_n:g}, beta {beta:g}, eps {eps:g}"
        raise CheckpointError(f"{path}.act_fn: expected numbers, eps at most 0, found {found}")
    return _softplus(alpha_p), beta + _softplus(alpha_n), beta, eps


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
