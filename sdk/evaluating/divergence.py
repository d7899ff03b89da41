"""How far the logits of two models are from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Rows compared at a time: with 262,144 tokens four arrays of 34 MB.
_ROWS = 32


def divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """``KL(reference || model)`` in nats of each row of float32 ``[n, vocab]``: float64 ``[n]``."""
    parts = zip(torch.split(reference, _ROWS), torch.split(logits, _ROWS), strict=True)
    return torch.cat([_divergence(x.log_softmax(-1), y.log_softmax(-1)) for x, y in parts])


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1, dtype=torch.float64)


class Comparison:
    """Sums over the rows of two models' logits for the same tokens."""

    def __init__(self) -> None:
        self._divergences: list[Tensor] = []
        self._agreeing = 0
        self._losses = [0.0, 0.0]
        self._predicted = 0

    def add(self, reference: Tensor, logits: Tensor, following: Tensor) -> None:
        """Rows float32 ``[n, vocab]`` and the tokens int64 ``[m]`` that came behind the first of
        them; ``m`` is ``n - 1`` where the text ends."""
        self._divergences.append(divergences(reference, logits))
        self._agreeing += int((reference.argmax(-1) == logits.argmax(-1)).sum())
        for i, rows in enumerate((reference, logits)):
            self._losses[i] += float(_losses(rows[: len(following)], following).sum())
        self._predicted += len(following)

    @property
    def count(self) -> int:
        """Rows compared."""
        return sum(map(len, self._divergences))

    @property
    def agreement(self) -> float:
        """The part of all rows whose likeliest token is the same."""
        return self._agreeing / max(self.count, 1)

    @property
    def perplexities(self) -> tuple[float, float]:
        """Of the reference and of the model, over the text."""
        reference, own = (math.exp(loss / max(self._predicted, 1)) for loss in self._losses)
        return reference, own

    def mean(self) -> float:
        """Of the divergences."""
        return float(torch.cat(self._divergences).mean())

    def quantile(self, part: float) -> float:
        """Of the divergences: 0.99 is what 1 % of all rows exceed."""
        return float(torch.cat(self._divergences).quantile(part))


def _losses(rows: Tensor, following: Tensor) -> Tensor:
    """``-log p`` of each token that came, float64."""
    chosen = rows.gather(1, following.unsqueeze(1)).squeeze(1)
    return (rows.logsumexp(-1) - chosen).to(torch.float64)
