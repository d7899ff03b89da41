"""Predicts the time of a step from its number of tokens, based on measured steps.

For hosts that give the engine a few milliseconds at a time: a step cannot be interrupted, so its
size must be chosen before it runs. The model is a line: a fixed time (the weights are read once,
however many tokens there are) and a time per token. It is fitted to about the last ten steps, so
that it follows changes it does not model: the length of the contexts, other processes on the
machine.
"""

from __future__ import annotations

#: Each new step multiplies the weight of older ones by this: the last ten steps weigh the most.
_DECAY = 0.9
#: Tokens of the first step. While weights are read from memory, not from a cache, a step of four
#: takes hardly longer than a step of one.
_FIRST_TOKENS = 4
#: A step has at most this many times the tokens of the largest remembered one, because a line
#: through small steps predicts little about large ones.
_GROWTH = 2.0
#: If the sizes of steps differ by less than this share of their mean, the fixed time cannot be told
#: from noise. Then the line goes through zero and overestimates larger steps.
_MIN_SPREAD = 0.1
#: A step that cannot end in time takes this much longer than its fixed time.
_OVERRUN = 0.5
#: One of this many such steps is larger by half, because steps of one size do not show the fixed
#: time.
_PROBE_EVERY = 8


class StepCosts:
    """A line fitted to measured steps. Times are seconds."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = 0.0  # weighted sums
        self._squares = self._products = 0.0
        self._largest = 0.0
        self._overruns = 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Add a measured step."""
        self._weight = self._weight * _DECAY + 1
        self._tokens = self._tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + seconds
        self._squares = self._squares * _DECAY + num_tokens**2
        self._products = self._products * _DECAY + num_tokens * seconds
        self._largest = max(self._largest * _DECAY, num_tokens)

    def _line(self) -> tuple[float, float]:
        """The fixed time and the time per token."""
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        steepest, prior = seconds / tokens, (_MIN_SPREAD * tokens) ** 2
        variance = self._squares / self._weight - tokens**2
        covariance = self._products / self._weight - tokens * seconds
        slope = (covariance + prior * steepest) / (variance + prior)
        slope = min(max(slope, 0.0), steepest)
        return seconds - slope * tokens, slope

    def most_tokens(self, seconds: float) -> int:
        """Tokens of the largest step that should end in time; 0 if not even one token would."""
        if not self._weight:
            return _FIRST_TOKENS
        fixed, slope = self._line()
        if fixed + slope * self._most <= seconds:
            return self._most
        return max(int((seconds - fixed) / slope), 0) if slope else 0

    def first_tokens(self, seconds: float) -> int:
        """:meth:`most_tokens` for a step that runs in any case. If it cannot end in time, it gets
        so many tokens that it takes half as long again as its fixed time: with one token it would
        take hardly less time, and a prompt would need many times as many steps.
        """
        most = self.most_tokens(seconds)
        if not self._weight:
            return most
        fixed, slope = self._line()
        worth = min(int(fixed * _OVERRUN / slope) if slope else self._most, self._most)
        if most >= max(worth, 1):
            return most
        self._overruns += 1
        if self._overruns % _PROBE_EVERY == 0:
            worth = max(worth, int(1.5 * self._tokens / self._weight) + 1)
        return min(max(worth, 1), self._most)

    @property
    def _most(self) -> int:
        return max(int(self._largest * _GROWTH), _FIRST_TOKENS)
