"""Finds where a text repeats its own end, for DRY and ``no_repeat_ngram_size``.

``lengths[i]``: how many tokens up to and including index ``i`` equal as many at the end of the
text. One pass over the text updates it for a new token. A table of all n-grams of 8,000 tokens
took 8 KiB for each of them, and comparing at every index takes time quadratic in the text.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Repeats:
    """The tokens of one text, and for each index the length of the repetition that ends there.

    A repetition contains no token of ``breakers``.
    """

    def __init__(self, breakers: Collection[int] = ()) -> None:
        self._breakers = breakers
        self._tokens = np.empty(64, np.int64)
        self._lengths = np.zeros(64, np.int64)
        self._count = 0

    def copy(self) -> Repeats:
        """A copy that is extended independently."""
        other = Repeats(self._breakers)
        other._tokens, other._lengths = self._tokens.copy(), self._lengths.copy()
        other._count = self._count
        return other

    @property
    def tokens(self) -> Ids:
        return self._tokens[: self._count]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append the next tokens of the text."""
        before, count = self._count, self._count + len(token_ids)
        if count > len(self._tokens):
            room = np.zeros(max(2 * len(self._tokens), count), np.int64)
            self._lengths = np.concatenate((self._lengths[:before], room[before:]))
            self._tokens = np.concatenate((self._tokens[:before], room[before:]))
        self._tokens[before:count] = token_ids
        self._count = count
        if len(token_ids) == 1:
            self._append()
        elif token_ids:
            self._lengths[:count] = self._measured()

    def _append(self) -> None:
        """Update after one token: repetitions continue where the same token occurs."""
        tokens, count = self.tokens, self._count
        token = int(tokens[-1])
        longer = np.zeros(count, np.int64)
        if token not in self._breakers:
            longer[1:] = self._lengths[: count - 1] + 1
            longer[0] = 1
            longer[tokens != token] = 0
        self._lengths[:count] = longer

    def _measured(self) -> Ids:
        """The lengths for the whole text: the Z algorithm on the reversed text, in linear time."""
        backwards = self.tokens[::-1].tolist()
        count = len(backwards)
        breaker = next((i for i, t in enumerate(backwards) if t in self._breakers), count)
        lengths = [0] * count
        left = right = 0
        for place in range(1, count):
            length = min(right - place, lengths[place - left]) if place < right else 0
            while place + length < count and backwards[length] == backwards[place + length]:
                length += 1
            lengths[place] = length
            if place + length > right:
                left, right = place, place + length
        if count:
            lengths[0] = count
        return np.minimum(np.array(lengths[::-1], np.int64), breaker)

    def followed(self, least: int, window: int = -1) -> tuple[Ids, Ids]:
        """The tokens that followed repetitions of at least ``least`` tokens, and their lengths.

        Both int64 ``[n]``. ``window``: the number of last tokens to search (negative: all).
        """
        count = self._count
        first = 0 if window < 0 else max(0, count - window)
        if count - first < 2:
            return self._tokens[:0], self._lengths[:0]
        lengths = self._lengths[first : count - 1]
        if first:
            lengths = np.minimum(lengths, np.arange(1, count - first))
        places = np.flatnonzero(lengths >= max(least, 1))
        return self._tokens[first + 1 : count][places], lengths[places]
