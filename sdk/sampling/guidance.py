"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): away from a negative prompt.

The same answer is continued after two prompts. What its own prompt makes likelier than the negative
one does is strengthened: ``log p = log p_negative + scale * (log p_own - log p_negative)``, up to a
constant. Scale 1 is no guidance, 0 is the negative prompt alone.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor


def apply_guidance(own: Tensor, negative: Tensor, scale: float) -> None:
    """Make the guided logits of ``own``, a row of logits ``[V]`` float32 of one request.

    One row at a time and in operations that round once: a fused one would round differently where
    torch splits the row over threads. On a CPU all but the normalization is numpy: torch would
    share each row of more than 32,768 numbers out among threads, which takes longer than the work
    where others are busy. NaN in either row comes out as NaN.
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
