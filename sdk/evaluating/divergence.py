"""Measures how far the logits of two models are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Rows compared at a time: arrays of 4 MB with 262,144 tokens, 2.6 ms per row. From 32 MB on the
#: allocator maps every array again: 15 ms.
_ROWS = 4


def divergences(reference: Tensor, logits: Tensor) -> Tensor:
    """``KL(reference || model)`` in nats of each row of float32 ``[n, vocab]``: float64 ``[n]``."""
    parts = zip(torch.split(reference, _ROWS), torch.split(logits, _ROWS), strict=True)
    return torch.cat([_divergence(x.log_softmax(-1), y.log_softmax(-1)) for x, y in parts])


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1, dtype=torch.float64)


class Comparison:
    """Statistics over the logits of two models for the same tokens."""

    def __init__(self) -> None:
        self._divergences: list[Tensor] = []
        self._agreeing = 0
        self._losses = [0.0, 0.0]
        self._predicted = 0

    def add(self, reference: Tensor, logits: Tensor, following: Tensor) -> Tensor:
        """Add rows float32 ``[n, vocab]``; ``following`` int64 ``[m]`` are the next tokens of the
        first ``m`` rows, where ``m`` is ``n``, or ``n - 1`` at the end of the text.

        Returns the divergence of each row, float64 ``[n]``: not finite if one of its logits is not.
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
        """The number of rows compared."""
        return sum(map(len, self._divergences))

    @property
    def agreement(self) -> float:
        """The share of all rows, 0 to 1, whose most likely token is the same."""
        return self._agreeing / max(self.count, 1)

    @property
    def perplexities(self) -> tuple[float, float]:
        """The perplexities of the reference and of the model over the text."""
        reference, own = (math.exp(loss / max(self._predicted, 1)) for loss in self._losses)
        return reference, own

    def mean(self) -> float:
        """The mean divergence, in nats."""
        return float(torch.cat(self._divergences).mean())

    def quantile(self, part: float) -> float:
        """The quantile ``part`` of the divergences: 1 % of all rows exceed that of 0.99."""
        return float(torch.cat(self._divergences).quantile(part))
