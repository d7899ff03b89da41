"""The time of a step that only decodes, by its number of tokens: measured, not modelled.

The curve has kinks where kernels change (SmolLM2 135M on two cores: 1 token 6.8 ms, 9 tokens
12.6 ms, 72 tokens 64 ms), and its slope decides how many drafts pay off. So each size is averaged
separately, and sizes in between are interpolated.
"""

from __future__ import annotations

from bisect import bisect_left, insort

#: The share of the last step in the average of its size.
_RATE = 0.25
#: A disturbed step counts as at most this many times the average.
_MOST_OUTLIER = 2.0
#: A size that was not measured in this many steps is forgotten: contexts have grown since.
_MAX_AGE = 1024
#: While only one size is known: the time of a token more, as a share of the time per token. 0.11
#: (1 token) to 0.6 (8 tokens) were measured.
_FIRST_SLOPE = 0.3


class DecodeCosts:
    """Average seconds of a step of ``n`` tokens: ``costs(n)``."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # measured ones, sorted
        self._seconds: dict[int, float] = {}
        self._learned: dict[int, int] = {}  # when last, by size
        self._steps = 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Add a measured step."""
        self._steps += 1
        known = self._seconds.get(num_tokens)
        if known is None:
            insort(self._sizes, num_tokens)
            self._seconds[num_tokens] = seconds
        else:
            self._seconds[num_tokens] += _RATE * (min(seconds, _MOST_OUTLIER * known) - known)
        self._learned[num_tokens] = self._steps
        if self._steps % _MAX_AGE == 0:
            self._forget()

    def _forget(self) -> None:
        oldest = self._steps - _MAX_AGE
        self._sizes = [size for size in self._sizes if self._learned[size] > oldest]
        self._seconds = {size: self._seconds[size] for size in self._sizes}
        self._learned = {size: self._learned[size] for size in self._sizes}

    def __call__(self, num_tokens: int) -> float:
        """The expected seconds of a step; 0 if nothing was measured."""
        known = self._seconds.get(num_tokens)
        if known is not None or not self._sizes:
            return known or 0.0
        sizes, seconds = self._sizes, self._seconds
        first, last = sizes[0], sizes[-1]
        index = bisect_left(sizes, num_tokens)
        if 0 < index < len(sizes):
            first, last = sizes[index - 1], sizes[index]
        if first == last:
            slope = _FIRST_SLOPE * seconds[first] / first
        else:
            slope = max(seconds[last] - seconds[first], 0.0) / (last - first)
        near = last if index == len(sizes) else first
        return max(seconds[near] + slope * (num_tokens - near), 0.0)
