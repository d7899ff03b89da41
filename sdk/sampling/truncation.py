"""From processed logits to one token per row on an accelerator: temperature, truncation, the draw.

Order: temperature, ``min_p``, ``top_k``, ``typical_p``, ``top_p`` (vLLM's, with typical where
llama.cpp has it), XTC; or mirostat instead of them all. ``top_p`` therefore counts what the earlier
ones left. Ties are always decided for the lowest token id.

All rows together, as a launch costs more than the arithmetic. :mod:`sdk.sampling.candidates` takes
the same steps on a CPU, one row at a time; the two agree to rounding, not to the bit. Here too no
operation mixes rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdk.sampling.state import RequestState
from sdk.sampling.uniform import TOKEN, XTC

_DROPPED = float("-inf")


def draw(logits: Tensor, states: Sequence[RequestState]) -> list[int]:
    """One token per row of ``logits [R, V]`` float32 (row ``i`` belongs to ``states[i]``)."""
    temperature = _column([s.temperature for s in states], logits)
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.to(torch.float32)
    if any(s.params.mirostat_mode for s in states):
        for i, state in enumerate(states):
            if state.params.mirostat_mode:
                _mirostat(scaled[i], state)
            else:
                scaled[i : i + 1] = truncate(scaled[i : i + 1], [state])
    else:
        scaled = truncate(scaled, states)
    cumulative = torch.softmax(scaled, -1).cumsum(-1, dtype=torch.float64)
    uniforms = _column([s.uniform(TOKEN) for s in states], logits)
    chosen = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    tokens: list[int] = chosen[:, 0].tolist()
    for i, state in enumerate(states):
        if state.params.mirostat_mode:
            state.learn(torch.softmax(scaled[i], -1)[tokens[i]].item())
    return tokens


def truncate(scaled: Tensor, states: Sequence[RequestState]) -> Tensor:
    """Set what the rows' parameters exclude to minus infinity; the best value of a row is 0."""
    all_params = [s.params for s in states]
    if any(p.min_p > 0 for p in all_params):
        # p >= min_p * p_best, as logits: log p - log p_best >= log(min_p), and the best is 0.
        least = _column([p.min_p for p in all_params], scaled).log().to(torch.float32)
        scaled = scaled.masked_fill(scaled < least, _DROPPED)
    vocab = scaled.shape[-1]
    if any(0 < p.top_k < vocab for p in all_params):
        counts = [p.top_k if 0 < p.top_k < vocab else vocab for p in all_params]
        scaled = scaled.masked_fill(~keep_first(scaled, _integers(counts, scaled)), _DROPPED)
    if any(p.typical_p < 1 for p in all_params):
        scaled = _typical(scaled, _column([p.typical_p for p in all_params], scaled))
    if any(p.top_p < 1 for p in all_params):
        scaled = _top_p(scaled, _column([p.top_p for p in all_params], scaled))
    for i, state in enumerate(states):
        probability = state.params.xtc_probability
        if probability > 0 and state.uniform(XTC) < probability:
            _exclude_top(scaled[i : i + 1], state.params.xtc_threshold)
    return scaled


def keep_first(values: Tensor, counts: Tensor, ordered: Tensor | None = None) -> Tensor:
    """Mask of the ``counts [R, 1]`` largest of each row of ``values [R, V]``, lowest id first."""
    ordered = values.sort(-1, descending=True).values if ordered is None else ordered
    least = ordered.gather(-1, counts - 1)
    above = values > least
    tied = values == least
    room = counts - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _top_p(scaled: Tensor, mass: Tensor) -> Tensor:
    """The smallest set of most likely tokens whose probabilities reach ``mass`` of the total."""
    probabilities = torch.softmax(scaled, -1)
    ordered = probabilities.sort(-1, descending=True).values
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    short = (cumulative < mass * cumulative[:, -1:]).sum(-1, keepdim=True)
    counts = (short + 1).clamp(max=scaled.shape[-1])
    keep = keep_first(probabilities, counts, ordered) | (mass >= 1)
    return scaled.masked_fill(~keep, _DROPPED)


def _typical(scaled: Tensor, mass: Tensor) -> Tensor:
    """Tokens whose surprise is closest to the entropy, up to ``mass`` (Meister et al. 2022)."""
    probabilities = torch.softmax(scaled, -1)
    # The surprise less the entropy is the mean of ``scaled`` less ``scaled``.
    terms = torch.where(probabilities > 0, probabilities * scaled, 0.0)
    mean = terms.cumsum(-1, dtype=torch.float64)[:, -1:].to(torch.float32)
    distance = (scaled - mean).abs()
    order = distance.sort(stable=True, dim=-1).indices
    cumulative = probabilities.gather(-1, order).cumsum(-1, dtype=torch.float64)
    before = cumulative.roll(1, -1)
    before[:, 0] = 0.0
    kept = (before < mass * cumulative[:, -1:]) | (mass >= 1)
    return scaled.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), _DROPPED)


def _exclude_top(row: Tensor, threshold: float) -> None:
    """XTC (p-e-w 2024): of the tokens at or above ``threshold`` only the least likely stays."""
    probabilities = torch.softmax(row, -1)
    # A token whose probability is 0 cannot be drawn, so it is not the one that stays.
    likely = int(((probabilities >= threshold) & (probabilities > 0)).sum())
    if likely >= 2:
        counts = _integers([likely - 1], row)
        row.masked_fill_(keep_first(probabilities, counts), _DROPPED)


def _mirostat(row: Tensor, state: RequestState) -> None:
    """Mirostat 2: drop what surprises more than ``mu`` bits, keep the best."""
    surprise = -torch.log_softmax(row, -1) / 0.6931471805599453
    best = row == 0.0
    row.masked_fill_((surprise > state.mu) & ~best, _DROPPED)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)[:, None]


def _integers(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=like.device)[:, None]
