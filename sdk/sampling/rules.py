"""The parts of a request that apply to every row of logits, as arrays shared by its answers.

``allowed_token_ids`` may have a million ids, and 64 answers process a row in every step: reading a
tuple of them took 40 ms each time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sdk.api.params import SamplingParams
from sdk.kernels.operators.sampling import Change, ChangeKind, Mask, mask_of

Ids = NDArray[np.int64]


class Rules:
    """The lists and bad words of one request's parameters. Read-only."""

    def __init__(
        self, params: SamplingParams, end_ids: Sequence[int], bad_words: Sequence[Sequence[int]]
    ) -> None:
        allowed, bias, ends = params.allowed_token_ids, params.logit_bias, tuple(end_ids)
        #: One bit per allowed token.
        self.mask: Mask | None = None if allowed is None else mask_of(allowed)
        self.bias: Change | None = None
        if bias:
            self.bias = Change(ChangeKind.ADD, list(bias), list(bias.values()))
        #: Forbids tokens that end the answer, before ``min_tokens``.
        self.ends: Change | None = None
        if ends and params.min_tokens:
            self.ends = Change(ChangeKind.FORBID, ends)
        self.scored_ids = np.array(sorted(set(params.logprob_token_ids or ())), np.int64)
        #: First tokens of a bad word -> the change that forbids its last token.
        self._completing: dict[tuple[int, ...], Change] = {}
        last: dict[tuple[int, ...], set[int]] = {}
        for word in bad_words:
            last.setdefault(tuple(word[:-1]), set()).add(word[-1])
        for before, tokens in last.items():
            self._completing[before] = Change(ChangeKind.FORBID, sorted(tokens))
        #: Distinct lengths of these beginnings: one look-up for each, however many words there are.
        self._lengths = sorted({len(before) for before in last})
        #: Whether the forbidden tokens depend on the tokens so far.
        self.follows_tokens = any(self._lengths)

    def completing(self, output: Sequence[int]) -> list[Change]:
        """The changes that forbid tokens which would complete a bad word after ``output``."""
        found = []
        for length in self._lengths:
            if length <= len(output):
                before = tuple(output[len(output) - length :])
                if (change := self._completing.get(before)) is not None:
                    found.append(change)
        return found
