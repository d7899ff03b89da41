"""How the logits of a request's next token change, updated token by token.

The order is that of :mod:`sdk.sampling.processors`: the mask of ``rules``, ``earlier``, callbacks
if there are any, ``later``. Without callbacks the sampling kernel applies all of them (``shape``).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sdk.api.params import SamplingParams
from sdk.kernels.operators.sampling import Change, ChangeKind, Shape
from sdk.sampling.healing import Healing
from sdk.sampling.repeats import Repeats
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.rules import Rules

# Longer DRY matches make no difference: 1.75**50 is 1e12.
_DRY_LONGEST = 50
_DRY_MOST = 1e4


class LogitChanges:
    """The changes of one answer. ``rules`` are those that depend only on its parameters."""

    def __init__(self, params: SamplingParams, resolved: ResolvedParams) -> None:
        self._params = params
        self._breakers = resolved.dry_breakers
        self._think_ids = resolved.think_start_id, resolved.think_end_id
        self.rules = resolved.rules or Rules(params, resolved.end_ids, resolved.bad_words)
        factors = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalties: Change | None = None
        if factors != (1.0, 0.0, 0.0):
            self._penalties = Change(ChangeKind.PENALIZE, factors=factors)
        #: Token id -> its index in the penalties.
        self._places: dict[int, int] = {}
        #: Earlier repetitions of the end of the text, prompt and output.
        self._dry = self._ngrams = None
        if params.dry_multiplier:
            self._dry = Repeats(self._breakers), Change(ChangeKind.ADD)
        if params.no_repeat_ngram_size:
            self._ngrams = Repeats(), Change(ChangeKind.FORBID)
        #: Tokens since thinking started; None outside thinking.
        self._thinking: int | None = None
        self._end_thinking: Change | None = None
        if params.thinking_token_budget is not None and resolved.think_end_id is not None:
            self._end_thinking = Change(ChangeKind.FORCE, [resolved.think_end_id])
        self._healing = resolved.healing
        #: After this many tokens of output, some tokens are forbidden.
        self._rewound: tuple[int, Change] | None = None
        #: Bytes of the healed text that the output has spelled; None: all of them.
        self._spelled: int | None = None if resolved.healing is None else 0
        own = (self._penalties, self._dry, self._ngrams, self._end_thinking)
        self._follow = self.rules.follows_tokens or any(x is not None for x in own)
        self._shape = Shape(self.rules.mask)
        self._shaped = False  # whether the shape is up to date

    def forbid(self, position: int, token_ids: Sequence[int]) -> None:
        """Forbid tokens after ``position`` tokens of output, only there. The output is not longer
        yet."""
        if token_ids:
            self._rewound = position, Change(ChangeKind.FORBID, token_ids)

    def copy(self) -> LogitChanges:
        """A copy that is extended independently, with its own shape."""
        other = copy.copy(self)
        other._places = self._places.copy()
        if self._penalties is not None:
            other._penalties = self._penalties.copy()
        if self._dry is not None:
            other._dry = self._dry[0].copy(), Change(ChangeKind.ADD)
        if self._ngrams is not None:
            other._ngrams = self._ngrams[0].copy(), Change(ChangeKind.FORBID)
        other._shape, other._shaped = Shape(self.rules.mask), False
        return other

    def follow(self, output: Sequence[int]) -> bool:
        """Whether the changes depend on the tokens that come after ``output``."""
        if self._rewound is not None and len(output) <= self._rewound[0]:
            return True
        return self._follow or self._spelled is not None or self._forbids_ends(output)

    def shape(self, output: Sequence[int]) -> Shape | None:
        """All changes after ``output``, which :meth:`extend` was given; None: there are none.

        Returns the same object each time, valid until :meth:`extend`.
        """
        if not self._shaped:
            self._shape.set_changes(self.earlier(output) + self.later())
            self._shaped = True
        return self._shape if self._shape.changes or self._shape.mask is not None else None

    def earlier(self, output: Sequence[int]) -> list[Change]:
        """Token healing, banned strings, bad words, ``min_tokens``, ``logit_bias``."""
        found = self.rules.completing(output)
        if self._rewound is not None and len(output) == self._rewound[0]:
            found.insert(0, self._rewound[1])
        if self._healing is not None and self._spelled is not None:
            found.insert(0, self._healing.change(self._spelled))
        if self.rules.ends is not None and self._forbids_ends(output):
            found.append(self.rules.ends)
        if self.rules.bias is not None:
            found.append(self.rules.bias)
        return found

    def later(self) -> list[Change]:
        """Penalties, DRY, n-grams, the thinking budget."""
        found = []
        if self._penalties is not None:
            found.append(self._penalties)
        if self._dry is not None:
            repeats, change = self._dry
            costs = self._dry_costs(repeats)
            change.write(list(costs), [-cost for cost in costs.values()])
            found.append(change)
        if self._ngrams is not None:
            repeats, change = self._ngrams
            size = self._params.no_repeat_ngram_size - 1
            change.write(repeats.followed(size)[0] if size else repeats.tokens)
            found.append(change)
        budget = self._params.thinking_token_budget
        if budget is not None and self._thinking is not None and self._thinking >= budget:
            assert self._end_thinking is not None  # tokens are counted only if it exists
            found.append(self._end_thinking)
        return found

    def extend(self, ids: Sequence[int], weight: int) -> None:
        """Add the next tokens of the prompt (``weight`` 0) or the output (1)."""
        if self._penalties is not None:
            self._count(self._penalties, Counter(ids), weight)
        for pair in (self._dry, self._ngrams):
            if pair is not None:
                pair[0].extend(ids)
        if self._params.thinking_token_budget is not None:
            for token in ids:
                self._think(token)
        changing = (self._healing, self.rules.ends, self._rewound)
        if self._follow or any(x is not None for x in changing):
            self._shaped = False
        if weight and self._healing is not None:
            self._heal(self._healing, ids)

    def _heal(self, healing: Healing, ids: Sequence[int]) -> None:
        for token_id in ids:
            if self._spelled is not None:
                self._spelled = healing.after(self._spelled, token_id)

    def _count(self, penalties: Change, times: Counter[int], weight: int) -> None:
        """Add ``weight`` for each occurrence of a token."""
        places = self._places
        known = len(places)
        found = [places.setdefault(token, len(places)) for token in times]
        penalties.resize(len(places))
        assert penalties.values is not None
        for place, (token, count) in zip(found, times.items(), strict=True):
            if place >= known:
                penalties.ids[place], penalties.values[place] = token, weight * count
            elif weight:
                penalties.values[place] += weight * count

    def _dry_costs(self, repeats: Repeats) -> dict[int, float]:
        """DRY ("don't repeat yourself", p-e-w 2024): tokens that continue a repetition, and costs.

        A token that followed an earlier copy of the last ``L`` tokens costs
        ``multiplier * base ** (L - allowed_length)`` for the longest such
        ``L >= allowed_length``. A match neither contains a sequence breaker nor continues with one.
        """
        params = self._params
        allowed, scale = params.dry_allowed_length, params.dry_multiplier
        tokens, lengths = repeats.followed(allowed, params.dry_penalty_last_n)
        by_length = np.argsort(lengths, kind="stable")
        longest = dict(zip(tokens[by_length].tolist(), lengths[by_length].tolist(), strict=True))
        return {
            token: min(scale * params.dry_base ** min(length - allowed, _DRY_LONGEST), _DRY_MOST)
            for token, length in longest.items()
            if token not in self._breakers
        }

    def _forbids_ends(self, output: Sequence[int]) -> bool:
        return self.rules.ends is not None and len(output) < self._params.min_tokens

    def _think(self, token: int) -> None:
        start, end = self._think_ids
        if token == start:
            self._thinking = 0
        elif token == end:
            self._thinking = None
        elif self._thinking is not None:
            self._thinking += 1
