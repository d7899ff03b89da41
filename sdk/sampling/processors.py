"""Changes to one row of logits, before temperature.

Order (vLLM's): allowed ids, bad words, ``min_tokens``, ``logit_bias``, ``logits_processors``, then
repetition, frequency and presence penalties; then DRY and ``no_repeat_ngram_size``; last of all
the thinking budget, which forces a token whatever else was asked. ``row`` is ``[V]`` float32,
changed in place; minus infinity forbids a token.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sdk.errors import RequestError
from sdk.kernels.reference.sampling import penalize
from sdk.sampling.penalties import penalties_of
from sdk.sampling.state import RequestState

_FORBIDDEN = float("-inf")
# A longer DRY match changes nothing (1.75**50 is 1e12) and costs time quadratic in the text.
_DRY_LONGEST = 50
_DRY_MOST = 1e4


def process(row: Tensor, state: RequestState) -> Tensor:
    """Apply everything ``state`` asks for; raises RequestError when a callback misbehaves."""
    params, resolved = state.params, state.resolved
    if params.allowed_token_ids is not None:
        kept = torch.full_like(row, _FORBIDDEN)
        allowed = _ids(params.allowed_token_ids, row)
        kept[allowed] = row[allowed]
        row = kept
    for word in resolved.bad_words:
        before = len(word) - 1
        if before == 0 or tuple(state.output[-before:]) == word[:-1]:
            row[word[-1]] = _FORBIDDEN
    if resolved.end_ids and len(state.output) < params.min_tokens:
        row[_ids(resolved.end_ids, row)] = _FORBIDDEN
    if params.logit_bias:
        row[_ids(params.logit_bias, row)] += torch.tensor(
            list(params.logit_bias.values()), dtype=row.dtype, device=row.device
        )
    row = _call_processors(row, state)
    if state.penalized:
        penalize(row[None], penalties_of([state], row.device))
    if params.dry_multiplier:
        for token, penalty in _dry_penalties(state).items():
            row[token] -= penalty
    if params.no_repeat_ngram_size:
        size = params.no_repeat_ngram_size - 1
        prefix = tuple(state.tokens[-size:]) if size else ()
        banned = state.ngrams.get(prefix)
        if banned:
            row[_ids(banned, row)] = _FORBIDDEN
    budget = params.thinking_token_budget
    if budget is not None and state.thinking is not None and state.thinking >= budget:
        assert resolved.think_end_id is not None  # only its token can have been counted against
        row = torch.full_like(row, _FORBIDDEN)
        row[resolved.think_end_id] = 0.0
    return row


def _ids(ids: object, row: Tensor) -> Tensor:
    array = np.fromiter(ids, dtype=np.int64)  # type: ignore[call-overload]
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


def _dry_penalties(state: RequestState) -> dict[int, float]:
    """DRY ("don't repeat yourself", p-e-w 2024): what would continue a repetition, and how bad.

    A token that followed an earlier copy of the last ``L`` tokens costs
    ``multiplier * base ** (L - allowed_length)`` for the longest such ``L >= allowed_length``. A
    match neither contains nor continues with a sequence breaker.
    """
    params, breakers = state.params, state.resolved.dry_breakers
    tokens = state.tokens
    if params.dry_penalty_last_n >= 0:
        tokens = tokens[max(0, len(tokens) - params.dry_penalty_last_n) :]
    if not tokens or tokens[-1] in breakers:
        return {}
    longest: dict[int, int] = {}
    limit = params.dry_allowed_length + _DRY_LONGEST
    last = tokens[-1]
    for end in range(len(tokens) - 1):
        following = tokens[end + 1]
        if tokens[end] != last or following in breakers:
            continue
        length = 1
        while length <= min(end, limit - 1):
            token = tokens[-1 - length]
            if tokens[end - length] != token or token in breakers:
                break
            length += 1
        longest[following] = max(length, longest.get(following, 0))
    allowed, scale = params.dry_allowed_length, params.dry_multiplier
    return {
        token: min(scale * params.dry_base ** (length - allowed), _DRY_MOST)
        for token, length in longest.items()
        if length >= allowed
    }
