"""Log-probabilities of the raw model distribution (natural log), with ranks.

They are taken before every processor, temperature and truncation (vLLM's ``raw_logprobs``). Rank 1
is the most likely token; of equally likely tokens the lowest id comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdk.engine.plan import Sampled


def scored(logits: Tensor, token_id: int, num_top: int | None, also: Sequence[int] = ()) -> Sampled:
    """Score ``token_id`` in ``logits [V]``, with the ``num_top`` best (-1: all) and ``also``."""
    # log_softmax of one row at a time: bitwise the same for any batch (see truncation).
    logprobs = torch.log_softmax(logits[None], -1)[0]
    ids = _best(logprobs, num_top or 0)
    top = list(zip(ids.tolist(), logprobs[ids].tolist(), range(1, len(ids) + 1), strict=True))
    if also:
        present = {entry[0] for entry in top}
        extra = [(i, *_place(logprobs, i)) for i in also if i not in present]
        top += sorted(dict.fromkeys(extra), key=lambda entry: entry[2])
    logprob, rank = _place(logprobs, token_id)
    return Sampled(token_id, logprob, rank, tuple(top))


def _best(logprobs: Tensor, count: int) -> Tensor:
    """Ids of the ``count`` largest, best first (topk alone may take any of several equals)."""
    if count < 0 or count >= len(logprobs):
        return logprobs.sort(descending=True, stable=True).indices
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=logprobs.device)
    least = logprobs.topk(count).values[-1]
    candidates = (logprobs >= least).nonzero()[:, 0]
    order = logprobs[candidates].sort(descending=True, stable=True).indices
    return candidates[order[:count]]


def _place(logprobs: Tensor, token_id: int) -> tuple[float, int]:
    value = logprobs[token_id]
    better = int((logprobs > value).sum()) + int((logprobs[:token_id] == value).sum())
    return value.item(), better + 1
