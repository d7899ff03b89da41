"""How long steps take by their number of tokens, learnt from steps that were measured.

For hosts that give the engine a few milliseconds at a time: a step cannot be interrupted, so its
size must be chosen before it runs. The time of a step is taken as a line over its tokens: a fixed
part (the weights are read once, however many tokens there are) and a part for each token. The line
is fitted to the last steps, some ten of them, so that it follows what it does not know of: the
length of the contexts, other processes on the machine.
"""

from __future__ import annotations

#: Of what is known, the share that is left when a step is added: the last ten steps weigh the most.
_KEPT = 0.9
#: Tokens of the first step. As long as weights are read from memory, not from a cache, a step of
#: four takes hardly longer than a step of one.
_FIRST = 4
#: A step has at most so many times the tokens of the largest one that is remembered: a line through
#: small steps says little about large ones.
_GROWTH = 2.0
#: Steps whose sizes differ by less than this share of their mean say nothing about the fixed part,
#: only noise: then the line goes through zero, which expects too much of a larger step.
_SPREAD = 0.1
#: How much longer than its fixed part a step is that does not end in time.
_STRETCH = 0.5
#: One of so many such steps is larger by half: from steps of one size the fixed part is not known.
_PROBED = 8


class StepCosts:
    """A line fitted to measured steps. Times are seconds."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = 0.0  # weighted sums
        self._squares = self._products = 0.0
        self._largest = 0.0
        self._overruns = 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._weight = self._weight * _KEPT + 1
        self._tokens = self._tokens * _KEPT + num_tokens
        self._seconds = self._seconds * _KEPT + seconds
        self._squares = self._squares * _KEPT + num_tokens**2
        self._products = self._products * _KEPT + num_tokens * seconds
        self._largest = max(self._largest * _KEPT, num_tokens)

    def _line(self) -> tuple[float, float]:
        """The fixed part and the part of each token."""
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        steepest, doubt = seconds / tokens, (_SPREAD * tokens) ** 2
        variance = self._squares / self._weight - tokens**2
        covariance = self._products / self._weight - tokens * seconds
        slope = (covariance + doubt * steepest) / (variance + doubt)
        slope = min(max(slope, 0.0), steepest)
        return seconds - slope * tokens, slope

    def most_tokens(self, seconds: float) -> int:
        """Tokens of the largest step that is expected to end in time; 0: not even a step of one."""
        if not self._weight:
            return _FIRST
        fixed, slope = self._line()
        if fixed + slope * self._most <= seconds:
            return self._most
        return max(int((seconds - fixed) / slope), 0) if slope else 0

    def first_tokens(self, seconds: float) -> int:
        """The same for a step that runs in any case. Where it cannot end in time it has as many
        tokens as make it half as long again as a step of none: with one token it would take hardly
        less time, and a prompt many times as many steps.
        """
        most = self.most_tokens(seconds)
        if not self._weight:
            return most
        fixed, slope = self._line()
        worth = min(int(fixed * _STRETCH / slope) if slope else self._most, self._most)
        if most >= max(worth, 1):
            return most
        self._overruns += 1
        if self._overruns % _PROBED == 0:
            worth = max(worth, int(1.5 * self._tokens / self._weight) + 1)
        return min(max(worth, 1), self._most)

    @property
    def _most(self) -> int:
        return max(int(self._largest * _GROWTH), _FIRST)
