"""The time of a step that only decodes, by its number of tokens: measured, not modelled.

The curve has kinks where kernels change (SmolLM2 135M on two cores: 1 token 6.8 ms, 9 tokens
12.6 ms, 72 tokens 64 ms), and its slope decides how many drafts pay off. So each size is averaged
separately, and sizes in between are interpolated.

Weights that draft take most of the time of a step, as much for each draft. So there is one average
for a draft, whatever the size: of many sizes, each measured a few times, the luckiest looked best.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

#: The share of the last step in the average of its size.
_RATE = 0.25
#: A disturbed step counts as at most this many times the average.
_MOST_OUTLIER = 2.0
#: A size that was not measured in this many steps is forgotten: contexts have grown since.
_MAX_AGE = 1024
#: After this many steps with drafts one without is measured again. Other processes may have
#: disturbed the last one, and then drafts would seem to pay off for as long as they run.
_MAX_PLAIN_AGE = 256
#: While no step with drafts is known: the time of a token more, as a share of the time per token.
#: 0.11 (1 token) to 0.6 (8 tokens) were measured.
_FIRST_SLOPE = 0.3


class DecodeCosts:
    """Average seconds of a step of ``n`` requests and ``m`` tokens: ``costs(n, m)``.

    Steps of 4 tokens differ: four requests, or one with drafts, which reads the keys and values of
    one request instead of four. Steps whose drafts the ranks made (``on_ranks``) take longer.
    """

    def __init__(self) -> None:
        self._curves: dict[int, Curve] = {}  # by number of requests
        #: Seconds of a draft that the ranks make and verify, by number of requests.
        self._on_ranks: dict[int, float] = {}
        self._steps = 0

    def learn(
        self, num_rows: int, num_tokens: int, seconds: float, *, on_ranks: bool = False
    ) -> None:
        """Add a measured step."""
        self._steps += 1
        if self._steps % _MAX_AGE == 0:
            oldest = self._steps - _MAX_AGE
            kept = {rows: curve for rows, curve in self._curves.items() if curve.forget(oldest)}
            self._curves = kept
            self._on_ranks = {rows: x for rows, x in self._on_ranks.items() if rows in kept}
        curve = self._curves.get(num_rows)
        if on_ranks and num_tokens > num_rows:
            if curve is not None:
                more = max(seconds - curve(num_rows), 0.0) / (num_tokens - num_rows)
                self._on_ranks[num_rows] = _averaged(self._on_ranks.get(num_rows), more)
            return
        if curve is None:
            curve = self._curves[num_rows] = Curve()
        curve.learn(num_tokens, seconds, self._steps)

    def __call__(self, num_rows: int, num_tokens: int, *, on_ranks: bool = False) -> float:
        """The expected seconds of a step; 0 while a step without drafts should be measured."""
        curve = self._curves.get(num_rows)
        if curve is None or curve.age(num_rows, self._steps) > _MAX_PLAIN_AGE:
            return 0.0
        if num_tokens == num_rows or (len(curve.sizes) > 1 and not on_ranks):
            return curve(num_tokens)
        of_draft = self._of_draft(num_rows, num_tokens - num_rows, on_ranks)
        return curve(num_rows) + of_draft * (num_tokens - num_rows)

    def _of_draft(self, num_rows: int, drafts: int, on_ranks: bool) -> float:
        """The seconds of a draft. If only steps without drafts are known of this many requests:
        that of the nearest number of requests."""
        known = list(self._on_ranks)
        if not on_ranks:
            known = [rows for rows, curve in self._curves.items() if len(curve.sizes) > 1]
        if not known:
            return _FIRST_SLOPE * self._curves[num_rows](num_rows) / num_rows
        near = min(known, key=lambda rows: abs(rows - num_rows))
        if on_ranks:
            return self._on_ranks[near]
        curve = self._curves[near]
        return max(curve(near + drafts) - curve(near), 0.0) / drafts


def _averaged(known: float | None, seconds: float) -> float:
    """The average with one more value."""
    if known is None:
        return seconds
    return known + _RATE * (min(seconds, _MOST_OUTLIER * known) - known)


class Curve:
    """Average seconds of a step by its size; sizes that were not measured are interpolated."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # measured ones, sorted
        self._seconds: dict[int, float] = {}
        self._learned: dict[int, int] = {}  # when last, by size

    def learn(self, num_tokens: int, seconds: float, step: int) -> None:
        known = self._seconds.get(num_tokens)
        if known is None:
            insort(self.sizes, num_tokens)
        self._seconds[num_tokens] = _averaged(known, seconds)
        self._learned[num_tokens] = step

    def age(self, num_tokens: int, step: int) -> float:
        """The steps since this size was measured."""
        learned = self._learned.get(num_tokens)
        return inf if learned is None else step - learned

    def forget(self, oldest: int) -> bool:
        """Forget sizes not measured since step ``oldest``; returns whether any is left."""
        self.sizes = [size for size in self.sizes if self._learned[size] > oldest]
        self._seconds = {size: self._seconds[size] for size in self.sizes}
        self._learned = {size: self._learned[size] for size in self.sizes}
        return bool(self.sizes)

    def __call__(self, num_tokens: int) -> float:
        known = self._seconds.get(num_tokens)
        if known is not None:
            return known
        sizes, seconds = self.sizes, self._seconds
        first, last = sizes[0], sizes[-1]
        index = bisect_left(sizes, num_tokens)
        if 0 < index < len(sizes):
            first, last = sizes[index - 1], sizes[index]
        slope = 0.0
        if first != last:
            slope = max(seconds[last] - seconds[first], 0.0) / (last - first)
        near = last if index == len(sizes) else first
        return max(seconds[near] + slope * (num_tokens - near), 0.0)
