"""What a request asks for of every row of logits, as arrays: made once and shared by its answers.

``allowed_token_ids`` may be a million ids, and 64 answers process a row in every step: a tuple of
them took 40 ms to read each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.sampling import Change, ChangeKind, Mask, mask_of
from sdk.params import SamplingParams

Ids = NDArray[np.int64]


class Rules:
    """The lists and words of one request's parameters. Read-only."""

    def __init__(
        self, params: SamplingParams, end_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> None:
        allowed, bias, ends = params.allowed_token_ids, params.logit_bias, tuple(end_ids)
        #: The bits of the tokens that are allowed.
        self.mask: Mask | None = None if allowed is None else mask_of(allowed)
        self.bias: Change | None = None
        if bias:
            self.bias = Change(ChangeKind.ADD, list(bias), list(bias.values()))
        #: Forbids what would end the answer, before ``min_tokens``.
        self.ends: Change | None = None
        if ends and params.min_tokens:
            self.ends = Change(ChangeKind.FORBID, ends)
        self.scored_ids = np.unique(np.array(params.logprob_token_ids or (), np.int64))
        #: Forbids what would complete a bad word, by the tokens of it that come before.
        self._completing: dict[tuple[int, ...], Change] = {}
        last: dict[tuple[int, ...], set[int]] = {}
        for word in bad_words:
            last.setdefault(tuple(word[:-1]), set()).add(word[-1])
        for before, tokens in last.items():
            self._completing[before] = Change(ChangeKind.FORBID, sorted(tokens))
        #: How long those beginnings are: one look-up for each, however many words there are.
        self._lengths = sorted({len(before) for before in last})
        #: Whether what is forbidden depends on the tokens so far.
        self.follows_tokens = any(self._lengths)

    def completing(self, output: Sequence[int]) -> list[Change]:
        """What forbids the tokens that would complete a bad word behind ``output``."""
        found = []
        for length in self._lengths:
            if length <= len(output):
                before = tuple(output[len(output) - length :])
                if (change := self._completing.get(before)) is not None:
                    found.append(change)
        return found
