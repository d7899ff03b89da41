"""What a request asks for of every row of logits, as arrays: made once and shared by its answers.

``allowed_token_ids`` may be a million ids, and 64 answers process a row in every step: a tuple of
them took 40 ms to read each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.params import SamplingParams

Ids = NDArray[np.int64]


class Rules:
    """The lists and words of one request's parameters. Read-only but for what it remembers."""

    def __init__(
        self, params: SamplingParams, end_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> None:
        allowed, bias = params.allowed_token_ids, params.logit_bias or {}
        self._allowed: Ids | None = None
        if allowed is not None:
            self._allowed = np.unique(np.array(allowed, np.int64))
        self._forbidden = np.empty(0, np.bool_)
        self.bias_ids = np.fromiter(bias, np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.end_ids = np.array(end_ids, np.int64)
        self.scored_ids = np.unique(np.array(params.logprob_token_ids or (), np.int64))
        #: Tokens that would complete a bad word, by the tokens of it that come before.
        self._completing: dict[tuple[int, ...], Ids] = {}
        ends: dict[tuple[int, ...], set[int]] = {}
        for word in bad_words:
            ends.setdefault(tuple(word[:-1]), set()).add(word[-1])
        for before, tokens in ends.items():
            self._completing[before] = np.array(sorted(tokens), np.int64)
        #: How long those beginnings are: one look-up for each, however many words there are.
        self._lengths = sorted({len(before) for before in ends})

    def forbidden(self, size: int) -> NDArray[np.bool_] | None:
        """Of ``size`` tokens those that are not allowed; None: all are."""
        if self._allowed is None:
            return None
        if len(self._forbidden) != size:
            forbidden = np.ones(size, np.bool_)
            forbidden[self._allowed] = False
            self._forbidden = forbidden
        return self._forbidden

    def completing(self, output: Sequence[int]) -> list[Ids]:
        """Tokens that would complete a bad word behind ``output``."""
        found = []
        for length in self._lengths:
            if length <= len(output):
                before = tuple(output[len(output) - length :])
                if (tokens := self._completing.get(before)) is not None:
                    found.append(tokens)
        return found
