"""Biases of attention scores by the distance of a key, as an architecture states them."""

from __future__ import annotations

from typing import NamedTuple


class Alibi(NamedTuple):
    """Attention with linear biases (Press et al. 2021, arXiv 2108.12409) in place of positions:
    the slope of a head times the distance of a key, which is at most 0, is added to its score.

    ``most``: the exponent of the steepest head's slope is ``most / heads``. ``scaled``: scores and
    biases are multiplied by the scale of attention, not scores alone (Falcon).
    """

    most: float = 8.0
    scaled: bool = False


class DistanceBuckets(NamedTuple):
    """Biases of attention scores by the distance of a key, in ``number`` buckets (T5): every head
    has one for each. Keys more than ``farthest`` away are in the last one of their side.

    ``table``: the table of all layers; ``None``: every layer has ``self_attn.distance_biases``.
    """

    number: int
    farthest: int
    table: str | None = "model.distance_biases"
