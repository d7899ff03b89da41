"""How far the logits of two models are from each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Rows compared at a time: arrays of 4 MB with 262,144 tokens, 2.6 ms a row. From 32 MB on the
#: allocator maps every array anew: 15 ms.
_ROWS = 4


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

    def add(self, reference: Tensor, logits: Tensor, following: Tensor) -> Tensor:
        """Rows float32 ``[n, vocab]`` and the tokens int64 ``[m]`` that came behind the first of
        them; ``m`` is ``n - 1`` where the text ends.

        Returns the rows' divergences, float64 ``[n]``: not finite where a logit is not.
        """
        parts = []
        for begin in range(0, len(reference), _ROWS):
            end = begin + _ROWS
            known, found = reference[begin:end], logits[begin:end]
            self._agreeing += int((known.argmax(-1) == found.argmax(-1)).sum())
            both = known.log_softmax(-1), found.log_softmax(-1)
            parts.append(_divergence(*both))
            came = following[begin:end].unsqueeze(1)
            for i, rows in enumerate(both):
                self._losses[i] -= float(rows[: len(came)].gather(1, came).sum(dtype=torch.float64))
        self._predicted += len(following)
        self._divergences.append(torch.cat(parts))
        return self._divergences[-1]

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
