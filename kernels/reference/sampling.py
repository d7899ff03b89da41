"""From logits to one token per row, all rows together, on any device: the definition.

:mod:`sdk.kernels.operators.sampling` has the steps and their order. No operation mixes rows.
Weights are float64 here, so that the sums a truncation or the draw compares are as good as exact.
"""

from __future__ import annotations

import math

import numpy as np

from sdk.kernels.backend import Problem
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.sampling import (
    FAR,
    Change,
    ChangeKind,
    Draws,
    Mask,
    SampleBuffers,
    Shape,
)

# Rows worked on together: bounds the memory of a sort of [rows, V].
_ROWS = 64
_DROPPED = float("inf")


class Sample:
    """See :meth:`sdk.kernels.operators.ops.Ops.sample`."""

    name = "reference.sample"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, logits: Tensor, draws: Draws | None, out: SampleBuffers) -> None:
        out.mask_tasks.compute()
        logits = logits.detach()
        values = logits.amax(-1)
        shaped = out.shaped(len(logits))
        if shaped:
            shaped = [row for row in shaped if math.isfinite(values[row])]
            logits = logits.clone()
            for row in shaped:
                change(logits[row], out.shapes[row], out.mask(row))
            values = logits.amax(-1)
        # max returns an arbitrary one of equal values, or of several NaN
        first = (logits == values[:, None]) | logits.isnan()
        tokens: list[int] = first.to(torch.uint8).argmax(-1).tolist()
        best: list[float] = values.tolist()
        probabilities = [1.0] * len(best)
        for row in shaped:
            if not math.isfinite(best[row]):
                probabilities[row] = 0.0
        if draws is not None:
            hot = np.flatnonzero(draws["temperature"][: len(best)] > 0)  # buffers may hold more
            drawn = [row for row in map(int, hot) if math.isfinite(best[row])]
            for start in range(0, len(drawn), _ROWS):
                part = drawn[start : start + _ROWS]
                found = draw(logits[torch.tensor(part, device=logits.device)], draws[part])
                for row, token, probability in zip(part, *found, strict=True):
                    tokens[row], probabilities[row] = token, probability
        rows = len(tokens)
        out.tokens[:rows], out.best[:rows] = tokens, best
        out.probabilities[:rows] = probabilities


def change(row: Tensor, shape: Shape | None, mask: Mask | None = None) -> None:
    """Apply a shape and another mask to ``row [V]`` float32, in place."""
    for one in (mask, None if shape is None else shape.mask):
        if one is not None:
            allow(row, one)
    for each in () if shape is None else shape.changes:
        apply(row, each)


def allow(row: Tensor, mask: Mask) -> None:
    """Forbid the tokens of ``row [V]`` that a mask excludes or does not reach."""
    bits = np.zeros(max(32 * len(mask), len(row)), np.uint8)
    bits[: 32 * len(mask)] = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")
    row[torch.from_numpy(bits[: len(row)] == 0).to(row.device)] = -math.inf


def apply(row: Tensor, change: Change) -> None:
    """Apply one change to ``row [V]`` float32, in place."""
    ids = change.ids[: change.count].astype(np.int64)
    known = (ids >= 0) & (ids < len(row))
    if change.kind is ChangeKind.FORCE:
        row.fill_(-math.inf)
        known[1:] = False
    places = torch.from_numpy(ids[known]).to(row.device)
    if change.values is None:
        row[places] = 0.0 if change.kind is ChangeKind.FORCE else -math.inf
        return
    numbers = torch.from_numpy(change.values[: change.count][known]).to(row.device)
    if change.kind is ChangeKind.ADD:
        row[places] += numbers
        return
    repetition, frequency, presence = torch.tensor(change.factors, device=row.device)
    values = row[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * numbers
    row[places] = values - presence * (numbers > 0).to(values.dtype)


def draw(logits: Tensor, draws: Draws) -> tuple[list[int], list[float]]:
    """Tokens and their probabilities for ``logits [R, V]``, whose maxima are finite."""
    temperature = _column(np.maximum(draws["temperature"], 1e-30), logits).to(torch.float32)
    gaps = truncate((logits.amax(-1, keepdim=True) - logits) / temperature, draws)
    weights = _weights(gaps)
    sums = weights.cumsum(-1)
    goal = _column(draws["uniform"], logits) * sums[:, -1:]
    chosen = torch.searchsorted(sums, goal, right=True)
    probabilities = weights.gather(-1, chosen) / sums[:, -1:]
    return chosen[:, 0].tolist(), probabilities[:, 0].tolist()


def truncate(gaps: Tensor, draws: Draws) -> Tensor:
    """Set the gaps of tokens that the parameters exclude to infinity; a row's least gap is 0."""
    mirostat = ~np.isnan(draws["mirostat_mu"])
    min_p = np.where(mirostat, 0.0, draws["min_p"])
    if (min_p > 0).any():
        # p >= min_p * p_best, as gaps: log p_best - log p <= -log(min_p)
        most = -_column(min_p, gaps).log().to(torch.float32)
        gaps = gaps.masked_fill(gaps > most, _DROPPED)
    vocab = gaps.shape[-1]
    counts = np.where(mirostat | (draws["top_k"] <= 0), vocab, np.minimum(draws["top_k"], vocab))
    if (counts < vocab).any():
        gaps = gaps.masked_fill(~keep_first(gaps, _column(counts, gaps)), _DROPPED)
    typical_p = np.where(mirostat, 1.0, draws["typical_p"])
    if (typical_p < 1).any():
        weights = _weights(gaps)
        terms = torch.where(weights > 0, weights * gaps, 0.0)
        mean = _total(terms) / _total(weights)
        gaps = _keep_mass(gaps, (gaps - mean.to(torch.float32)).abs(), typical_p)
    top_p = np.where(mirostat, 1.0, draws["top_p"])
    if (top_p < 1).any():
        gaps = _keep_mass(gaps, gaps, top_p)
    for row in np.flatnonzero(mirostat):
        _mirostat(gaps[row], float(draws["mirostat_mu"][row]))
    for row in np.flatnonzero(~mirostat & (draws["xtc_threshold"] >= 0)):
        _exclude_top(gaps[row : row + 1], float(draws["xtc_threshold"][row]))
    return gaps


def keep_first(values: Tensor, counts: Tensor) -> Tensor:
    """Mask of the ``counts [R, 1]`` smallest of each row of ``values [R, V]``, lowest id first."""
    most = values.sort(-1).values.gather(-1, counts - 1)
    below = values < most
    tied = values == most
    room = counts - below.sum(-1, keepdim=True)
    return below | (tied & (tied.cumsum(-1) <= room))


def _keep_mass(gaps: Tensor, values: Tensor, masses: np.ndarray) -> Tensor:
    """Keep the tokens with the smallest ``values [R, V]`` until their weights reach ``masses``."""
    mass = _column(masses, gaps)
    order = values.sort(dim=-1, stable=True).indices
    sums = _weights(gaps).gather(-1, order).cumsum(-1)
    before = sums.roll(1, -1)
    before[:, 0] = 0.0
    kept = (before < mass * sums[:, -1:]) | (mass >= 1)
    kept[:, 0] = True  # even if the mass is so small that its share of the total is 0
    return gaps.masked_fill(~torch.zeros_like(kept).scatter(-1, order, kept), _DROPPED)


def _exclude_top(row: Tensor, threshold: float) -> None:
    """XTC (p-e-w 2024): of the tokens at or above ``threshold``, keep only the least likely."""
    weights = _weights(row)
    # A token whose weight is 0 cannot be drawn, so it is not the one to keep.
    likely = int(((weights >= threshold * _total(weights)) & (weights > 0)).sum())
    if likely >= 2:
        first = keep_first(row, torch.tensor([[likely - 1]], device=row.device))
        row.masked_fill_(first, _DROPPED)


def _mirostat(row: Tensor, mu: float) -> None:
    """Mirostat 2 (Basu et al. 2021): drop tokens of more than ``mu`` bits of surprise, but never
    the best."""
    total = _total(_weights(row))
    row.masked_fill_((row > mu * math.log(2) - total.log()) & (row > 0), _DROPPED)


def _weights(gaps: Tensor) -> Tensor:
    return (-gaps.double()).exp().masked_fill(gaps > FAR, 0.0)


def _total(values: Tensor) -> Tensor:
    """The sum of each row; torch's sum would depend on the number of threads."""
    return values.cumsum(-1)[..., -1:]


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))[:, None].to(like.device)
