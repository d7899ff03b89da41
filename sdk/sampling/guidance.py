"""Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): away from a negative prompt.

The same answer is continued after two prompts. What its own prompt makes likelier than the negative
one does is strengthened: ``log p = log p_negative + scale * (log p_own - log p_negative)``, up to a
constant. Scale 1 is no guidance, 0 is the negative prompt alone.
"""

from __future__ import annotations

from torch import Tensor


def guided(own: Tensor, negative: Tensor, scale: float) -> Tensor:
    """The guided logits ``[V]`` float32 of one request from two rows of logits ``[V]``.

    One row at a time and in operations that round once: a fused one would round differently where
    torch splits the row over threads. NaN in either row comes out as NaN.
    """
    base = negative.log_softmax(-1)
    return base + (own.log_softmax(-1) - base) * scale
