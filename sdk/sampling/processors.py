"""Changes to one row of logits, before temperature.

Order (vLLM's): allowed ids, bad words, ``min_tokens``, ``logit_bias``, ``logits_processors``, then
repetition, frequency and presence penalties; then DRY and ``no_repeat_ngram_size``; last of all
the thinking budget, which forces a token whatever else was asked. ``row`` is ``[V]`` float32,
changed in place; minus infinity forbids a token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.errors import RequestError
from sdk.kernels.reference.sampling import penalize
from sdk.sampling.penalties import penalties_of
from sdk.sampling.repeats import Repeats
from sdk.sampling.state import RequestState

_FORBIDDEN = float("-inf")
# A longer DRY match changes nothing: 1.75**50 is 1e12.
_DRY_LONGEST = 50
_DRY_MOST = 1e4


def process(row: Tensor, state: RequestState) -> Tensor:
    """Apply everything ``state`` asks for; raises RequestError when a callback misbehaves."""
    params, resolved, rules = state.params, state.resolved, state.rules
    forbidden = rules.forbidden(len(row))
    if forbidden is not None:
        _forbid(row, forbidden)
    for ids in rules.completing(state.output):
        _forbid(row, ids)
    if len(rules.end_ids) and len(state.output) < params.min_tokens:
        _forbid(row, rules.end_ids)
    if len(rules.bias_ids):
        _add(row, rules.bias_ids, rules.bias)
    row = _call_processors(row, state)
    if state.penalized:
        penalize(row[None], penalties_of([state], row.device))
    if state.dry is not None:
        ids, penalties = _dry_penalties(state.dry, state)
        _add(row, ids, -penalties)
    if state.ngrams is not None:
        size = params.no_repeat_ngram_size - 1
        banned = state.ngrams.followed(size)[0] if size else state.ngrams.tokens
        _forbid(row, banned)
    budget = params.thinking_token_budget
    if budget is not None and state.thinking is not None and state.thinking >= budget:
        assert resolved.think_end_id is not None  # only its token can have been counted against
        row = torch.full_like(row, _FORBIDDEN)
        row[resolved.think_end_id] = 0.0
    return row


def _forbid(row: Tensor, which: NDArray[Any]) -> None:
    """Ids, or a mask of all tokens. Torch would share a mask out among threads: see guidance."""
    if row.device.type == "cpu":
        row.numpy()[which] = _FORBIDDEN
    else:
        row[_on(row, which)] = _FORBIDDEN


def _add(row: Tensor, ids: NDArray[np.int64], values: NDArray[np.float32]) -> None:
    if row.device.type == "cpu":
        row.numpy()[ids] += values
    else:
        row[_on(row, ids)] += _on(row, values)


def _on(row: Tensor, array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array).to(row.device)


def _call_processors(row: Tensor, state: RequestState) -> Tensor:
    for processor in state.params.logits_processors or ():
        name = getattr(processor, "__name__", type(processor).__name__)
        try:
            result = processor(tuple(state.output), row)
        except Exception as error:
            raise RequestError(
                f"logits processor {name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(result, Tensor) or result.shape != row.shape:
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise RequestError(
                f"logits processor {name} must return a tensor of shape {tuple(row.shape)}, "
                f"got {found}"
            )
        row = result.detach().to(device=row.device, dtype=torch.float32)
    return row


def _dry_penalties(
    repeats: Repeats, state: RequestState
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """DRY ("don't repeat yourself", p-e-w 2024): what would continue a repetition, and how bad.

    A token that followed an earlier copy of the last ``L`` tokens costs
    ``multiplier * base ** (L - allowed_length)`` for the longest such ``L >= allowed_length``. A
    match neither contains nor continues with a sequence breaker.
    """
    params, breakers = state.params, state.resolved.dry_breakers
    allowed, scale = params.dry_allowed_length, params.dry_multiplier
    tokens, lengths = repeats.followed(allowed, params.dry_penalty_last_n)
    by_length = np.argsort(lengths, kind="stable")
    longest = dict(zip(tokens[by_length].tolist(), lengths[by_length].tolist(), strict=True))
    penalties = {
        token: min(scale * params.dry_base ** min(length - allowed, _DRY_LONGEST), _DRY_MOST)
        for token, length in longest.items()
        if token not in breakers
    }
    ids = np.fromiter(penalties, np.int64, len(penalties))
    return ids, np.fromiter(penalties.values(), np.float32, len(penalties))
