"""From one row of processed logits to its token on a CPU; :mod:`sdk.sampling.truncation` has the
same steps for an accelerator, and their order.

The row shrinks as early as it can: each step looks only at the tokens that can still be chosen, so
that sorting and exponentials see some hundreds instead of the vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sdk.params import SamplingParams
from sdk.sampling.rows import (
    Floats,
    Indices,
    RunningSum,
    Scratch,
    ascending,
    from_least,
    largest,
)
from sdk.sampling.state import RequestState
from sdk.sampling.uniform import TOKEN, XTC


class Candidates:
    """The tokens still in the running: ``ids [n]`` ascending (None: all) and their logits."""

    __slots__ = ("_scratch", "_weights", "ids", "scaled")

    def __init__(self, logits: Floats, temperature: float, scratch: Scratch) -> None:
        #: Logits after temperature; the best one of the row is 0.
        self.scaled = np.subtract(logits, logits.max(), out=scratch.scaled)
        if temperature != 1.0:
            np.divide(self.scaled, np.float32(temperature), out=self.scaled)
        self.ids: Indices | None = None
        self._weights: Floats | None = None
        self._scratch = scratch

    def weights(self) -> Floats:
        """``exp(scaled)``: what the tokens' probabilities are proportional to."""
        if self._weights is None:
            self._weights = np.exp(self.scaled, out=self._scratch.weights[: len(self.scaled)])
        return self._weights

    def keep(self, index: Indices) -> None:
        """Drop all but the candidates at ``index``, which is ascending."""
        self.ids = index if self.ids is None else self.ids[index]
        self.scaled = self.scaled[index]
        if self._weights is not None:
            self._weights = self._weights[index]

    def drop(self, index: Indices) -> None:
        """Make the candidates at ``index`` impossible; they keep their places."""
        self.scaled[index] = -np.inf
        self.weights()[index] = 0.0


def draw(logits: Floats, state: RequestState, scratch: Scratch) -> int:
    """The token of one row ``logits [V]``, whose maximum is finite; the row is not changed."""
    with np.errstate(all="ignore"):
        candidates = truncate(logits, state, scratch)
        weights = candidates.weights()
        sums = RunningSum(weights)
        chosen = sums.find(state.uniform(TOKEN) * sums.total, "right")
        if state.params.mirostat_mode:
            state.learn(float(weights[chosen]) / sums.total)
        return chosen if candidates.ids is None else int(candidates.ids[chosen])


def truncate(logits: Floats, state: RequestState, scratch: Scratch) -> Candidates:
    """What the request's parameters leave of a row."""
    params = state.params
    candidates = Candidates(logits, state.temperature, scratch)
    if params.mirostat_mode:
        _mirostat(candidates, state.mu)
        return candidates
    if params.min_p > 0:
        least = np.float32(math.log(params.min_p))
        candidates.keep(scratch.at_least(candidates.scaled, least))
    if 0 < params.top_k < len(candidates.scaled):
        candidates.keep(largest(candidates.scaled, params.top_k, scratch))
    if params.typical_p < 1:
        _typical(candidates, params.typical_p, scratch)
    if params.top_p < 1:
        _top_p(candidates, params.top_p, scratch)
    if params.xtc_probability > 0 and state.uniform(XTC) < params.xtc_probability:
        _exclude_top(candidates, params, scratch)
    return candidates


def _top_p(candidates: Candidates, mass: float, scratch: Scratch) -> None:
    """The smallest set of most likely tokens whose probabilities reach ``mass`` of the total."""
    weights = candidates.weights()
    total = float(weights.sum(dtype=np.float64))
    # Tokens below the bound weigh less than (1 - mass) * total together, even if it were all n: the
    # others reach the mass, so the set lies among them.
    bound = (1 - mass) * total / len(weights)
    ordered = weights[scratch.at_least(weights, np.float32(bound))]
    ordered.sort()
    ordered = ordered[::-1]
    count = RunningSum(ordered).find(mass * total, "left") + 1
    candidates.keep(from_least(weights, ordered[count - 1], count, scratch))


def _typical(candidates: Candidates, mass: float, scratch: Scratch) -> None:
    """Tokens whose surprise is closest to the entropy, up to ``mass`` (Meister et al. 2022)."""
    weights = candidates.weights()
    # -log p is log(total) - scaled, and the entropy is the mean of that: the distance between the
    # two is that of ``scaled`` from its mean. The floor keeps 0 * -inf from being NaN.
    scaled = np.maximum(candidates.scaled, np.float32(-1e30))
    mean = (weights * scaled).sum(dtype=np.float64) / weights.sum(dtype=np.float64)
    distance = np.abs(np.subtract(scaled, np.float32(mean), out=scaled), out=scaled)
    order = ascending(distance, scratch)
    sums = RunningSum(weights[order])
    count = sums.find(mass * sums.total, "left") + 1
    candidates.keep(np.sort(order[:count]))


def _exclude_top(candidates: Candidates, params: SamplingParams, scratch: Scratch) -> None:
    """XTC (p-e-w 2024): of the tokens at or above ``threshold`` only the least likely stays."""
    weights = candidates.weights()
    bound = np.float32(params.xtc_threshold * weights.sum(dtype=np.float64))
    # A token whose weight is 0 cannot be drawn, so it is not the one that stays.
    likely: NDArray[np.bool_] = (weights >= bound) & (weights > 0)
    count = np.count_nonzero(likely)
    if count >= 2:
        candidates.drop(largest(weights, count - 1, scratch))


def _mirostat(candidates: Candidates, mu: float) -> None:
    """Mirostat 2 (Basu et al. 2021): drop what surprises more than ``mu`` bits, keep the best."""
    total = float(candidates.weights().sum(dtype=np.float64))
    least = np.float32(math.log(total) - mu * math.log(2))
    scaled = candidates.scaled
    candidates.keep(np.flatnonzero((scaled >= least) | (scaled == 0.0)))
