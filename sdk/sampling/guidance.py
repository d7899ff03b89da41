"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): away from a negative prompt.

The answer continues two prompts, its own and a negative one. Tokens that its own prompt makes more
likely than the negative prompt are boosted, up to a constant:
``log p = log p_negative + scale * (log p_own - log p_negative)``. Scale 1 means no guidance, 0 is
only the negative prompt.
"""

from __future__ import annotations

import numpy as np

from sdk.kernels.lazy_torch import Tensor


def apply_guidance(own: Tensor, negative: Tensor, scale: float) -> None:
    """Replace ``own`` by the guided logits. Both are one row of logits, ``[V]`` float32.

    Works on one row at a time, in separately rounded operations: a fused one would round
    differently where torch splits the row over threads. On a CPU everything except the
    normalization is numpy: torch would spread each row of more than 32,768 numbers over threads,
    which takes longer than the work itself on a busy machine. NaN in either row gives NaN.
    """
    base, log_p = negative.log_softmax(-1), own.log_softmax(-1)
    if own.device.type != "cpu":
        own.copy_(base + (log_p - base) * scale)
        return
    below, above = base.numpy(), log_p.numpy()
    with np.errstate(all="ignore"):
        np.subtract(above, below, out=above)
        np.multiply(above, np.float32(scale), out=above)
        np.add(below, above, out=own.numpy())
