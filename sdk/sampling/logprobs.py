"""Log-probabilities of the raw model distribution (natural log), with ranks.

They are computed before all processors, temperature and truncation (vLLM's ``raw_logprobs``).
Rank 1 is the most likely token; among equally likely tokens the lowest id comes first.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sdk.api.logprobs import Logprobs, Sampled, sort_keys
from sdk.sampling.rows import Floats, Scratch, largest
from sdk.sampling.rules import Ids

NO_IDS: Ids = np.empty(0, np.int64)
#: One token's rank takes two passes over the row, 30 us for 49,152 tokens; sorting all 0.5 ms.
_SORT_FROM = 16


def scored(
    logits: Floats,
    token_id: int,
    num_top: int | None,
    scratch: Scratch,
    also: Ids = NO_IDS,
) -> Sampled:
    """Score ``token_id`` in ``logits [V]`` float32, the ``num_top`` best tokens (-1: all), and the
    distinct ids ``also``."""
    best = logits.max()
    with np.errstate(all="ignore"):
        below = np.subtract(logits, best, out=scratch.scaled)
        weights = np.exp(below, out=scratch.weights)
    # log p = logit - offset in float64; only the weights were rounded to float32.
    offset = float(best) + math.log(weights.sum(dtype=np.float64))
    rank = int(_ranks(logits, np.array([token_id]))[0])
    logprob = float(logits[token_id]) - offset
    count = len(logits) if num_top == -1 else min(num_top or 0, len(logits))
    if count == len(logits):  # a copy, because the step reuses the row
        return Sampled(token_id, logprob, rank, Logprobs(None, logits.copy(), None, offset))
    ids = _best(logits, count, scratch)
    ranks = np.arange(1, count + 1, dtype=np.int32)
    if len(also):
        present = np.zeros(len(logits), np.bool_)
        present[ids] = True
        more = also[~present[also]]
        more_ranks = _ranks(logits, more)
        order = np.argsort(more_ranks)
        ids = np.concatenate((ids, more[order]))
        ranks = np.concatenate((ranks, more_ranks[order]))
    if rank > count and not (ids == token_id).any():
        ids = np.append(ids, token_id)
        ranks = np.append(ranks, np.int32(rank))
    top = Logprobs(ids.astype(np.int32), logits[ids], ranks, offset)
    return Sampled(token_id, logprob, rank, top)


def _best(logits: Floats, count: int, scratch: Scratch) -> Ids:
    """The ids of the ``count`` best, best first."""
    if not count:
        return NO_IDS
    ids = largest(logits, count, scratch)
    ordered: Ids = ids[np.argsort(-logits[ids], kind="stable")]
    return ordered


def _ranks(logits: Floats, ids: Ids) -> NDArray[np.int32]:
    """The ranks of tokens, ordered by logit, then by id."""
    values = logits[ids]
    if len(ids) < _SORT_FROM:
        better = [np.count_nonzero(logits > value) for value in values]
        lower = [
            np.count_nonzero(logits[:token_id] == value)
            for token_id, value in zip(ids, values, strict=True)
        ]
        few: NDArray[np.int32] = np.array(better, np.int32) + np.array(lower, np.int32) + 1
        return few
    keys = sort_keys(logits)
    own = keys[ids]
    keys.sort()
    order = np.argsort(own)  # searching in ascending order stays in the cache
    ranks = np.empty(len(ids), np.int32)
    ranks[order] = np.searchsorted(keys, own[order]) + 1
    return ranks
