"""Log-probabilities of the raw model distribution (natural log), with ranks.

They are taken before every processor, temperature and truncation (vLLM's ``raw_logprobs``). Rank 1
is the most likely token; of equally likely tokens the lowest id comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sdk.engine.plan import Sampled
from sdk.sampling.rows import Floats, Scratch, largest


def scored(
    logits: Floats,
    token_id: int,
    num_top: int | None,
    scratch: Scratch,
    also: Sequence[int] = (),
) -> Sampled:
    """Score ``token_id`` in ``logits [V]``, with the ``num_top`` best (-1: all) and ``also``."""
    best = logits.max()
    with np.errstate(all="ignore"):
        below = np.subtract(logits, best, out=scratch.scaled)
        weights = np.exp(below, out=scratch.weights)
    # log p = logit - offset in float64; of its terms only the weights were rounded to float32.
    offset = float(best) + math.log(weights.sum(dtype=np.float64))
    count = len(logits) if num_top == -1 else num_top or 0
    top: list[tuple[int, float, int]] = []
    if count:
        ids = largest(logits, count, scratch)
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        scores = logits[ids].astype(np.float64) - offset
        top = list(zip(ids.tolist(), scores.tolist(), range(1, len(ids) + 1), strict=True))
    if also:
        present = {entry[0] for entry in top}
        extra = [(i, *_place(logits, i, offset)) for i in also if i not in present]
        top += sorted(dict.fromkeys(extra), key=lambda entry: entry[2])
    logprob, rank = _place(logits, token_id, offset)
    return Sampled(token_id, logprob, rank, tuple(top))


def _place(logits: Floats, token_id: int, offset: float) -> tuple[float, int]:
    """A token's log-probability, and its rank by logit and then by id."""
    value = logits[token_id]
    better = np.count_nonzero(logits > value) + np.count_nonzero(logits[:token_id] == value)
    return float(value) - offset, int(better) + 1
