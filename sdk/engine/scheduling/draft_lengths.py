"""How many drafts pay off: as many as raise the expected tokens per second of the whole step.

A step of ``n`` requests takes ``costs(n, n)`` and gives n tokens; with ``k`` drafts it takes
``costs(n, n + k)`` and gives the tokens that are expected to be accepted in addition. Both sides
are measured: step times by size (``decode_costs.py``), acceptance for each request, separately for
short matches, long matches and drafts of weights. Weights draft about as well for one request as
for another, so a request begins with what they achieved for others. Only speed depends on these
measurements, never the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import NamedTuple

from sdk.engine.scheduling.decode_costs import DecodeCosts

#: Matches of at least this many tokens have a separate acceptance, and these shares of their drafts
#: are expected to be accepted until more is known.
_GRADES = ((8, 0.85), (4, 0.7), (2, 0.5), (0, 0.35))
#: The same for drafts of weights, whose grade is the one after these.
_OF_WEIGHTS, _WEIGHTS_SHARE = len(_GRADES), 0.7
#: The expectation weighs as much as this many drafts.
_PRIOR_DRAFTS = 2.0
#: Each verified proposal multiplies the weight of older ones by this; over all requests by more.
_DECAY, _SLOW_DECAY = 0.9, 0.99
#: Drafts are cut where the probability that one is reached and accepted falls below one of these;
#: the best one is chosen by expected speed.
_CUTS = (0.08, 0.2, 0.35, 0.5, 0.65, 0.8)
_LOG_CUTS = tuple(log(cut) for cut in _CUTS)
#: Drafts must make a step better by this factor. Of many sizes that were measured a few times, the
#: one that looks best was often only lucky: with 1.03, four requests lost 14 % (docs/log.md).
_LEAST_GAIN = 1.1
#: After this many proposals that did not seem to pay off, one is verified nevertheless, with this
#: many drafts. Each time the number of proposals doubles.
_FIRST_PROBE, _LAST_PROBE, PROBE_DRAFTS = 16, 512, 2
#: The share of the time of steps that such trials may take.
_PROBE_TIME = 0.01
#: Without a match a request is looked at in every step at first, then in every fourth.
_LAST_LOOK = 4
_LOOKS = 8


class Acceptance:
    """The probability that a draft is accepted, if those before it are.

    ``expected``: what it is until more is known.
    """

    __slots__ = ("_accepted", "_decay", "_rejected")

    def __init__(self, expected: float, decay: float) -> None:
        self._accepted = expected * _PRIOR_DRAFTS
        self._rejected = (1 - expected) * _PRIOR_DRAFTS
        self._decay = decay

    def learn(self, drafted: int, accepted: int) -> None:
        """Learn from one proposal."""
        self._accepted = self._decay * self._accepted + accepted
        self._rejected = self._decay * self._rejected + (accepted < drafted)

    @property
    def share(self) -> float:
        """The probability, from 0.01 to 0.99."""
        return min(max(self._accepted / (self._accepted + self._rejected), 0.01), 0.99)

    @classmethod
    def of_weights(cls) -> Acceptance:
        """That of drafts of weights, over all requests."""
        return cls(_WEIGHTS_SHARE, _SLOW_DECAY)


class DraftHistory:
    """What became of a request's drafts. ``of_weights``: what became of all drafts of weights."""

    __slots__ = ("_known", "_of_weights", "_seen", "grade", "look_at", "misses", "probe", "unused")

    def __init__(self, of_weights: Acceptance) -> None:
        shares = [*(share for _, share in _GRADES), of_weights.share]
        self._known = [Acceptance(share, _DECAY) for share in shares]  # by grade
        self._of_weights = of_weights
        self._seen = 0, 0  # drafts and accepted ones that were learned from
        self.grade = 0  # of the last proposal
        self.look_at = 0  # the step in which to look for a match again
        self.misses = 0  # looks without a match, one after another
        self.unused = 0  # proposals since the last one that was verified
        self.probe = _FIRST_PROBE

    def learn(self, drafted: int, accepted: int) -> None:
        """Learn from the request's totals."""
        new = drafted - self._seen[0]
        if not new:
            return
        good = accepted - self._seen[1]
        self._seen = drafted, accepted
        self._known[self.grade].learn(new, good)
        if self.grade == _OF_WEIGHTS:
            self._of_weights.learn(new, good)
        self.unused = 0
        if good:
            self.probe = _FIRST_PROBE

    def acceptance(self, match: int, *, on_ranks: bool) -> float:
        """The probability that a draft of the next proposal is accepted, if those before it are.

        ``match``: how many tokens it is based on. ``on_ranks``: weights draft.
        """
        grade = _OF_WEIGHTS if on_ranks else 0
        while not on_ranks and match < _GRADES[grade][0]:
            grade += 1
        self.grade = grade
        return self._known[grade].share

    def missed(self, step: int) -> None:
        """There is no match in this step."""
        self.misses += 1
        self.look_at = step + min(1 + self.misses // _LOOKS, _LAST_LOOK)

    def probes(self) -> bool:
        """Whether to verify a proposal that does not seem to pay off."""
        self.unused += 1
        if self.unused < self.probe:
            return False
        self.probe = min(2 * self.probe, _LAST_PROBE)
        self.unused = 0
        return True


class Choice(NamedTuple):
    """Lengths for some proposals, and the expected tokens per second."""

    lengths: list[int]
    speed: float


class DraftLengths:
    """Chooses the number of drafts, and learns what steps cost."""

    def __init__(self) -> None:
        self.costs = DecodeCosts()
        self._probe_seconds = 0.0  # that trials may take now

    def learn_step(
        self, num_rows: int, num_tokens: int, seconds: float, *, on_ranks: bool = False
    ) -> None:
        """Learn from the time of a step in which all rows decoded. ``on_ranks``: ranks drafted."""
        self.costs.learn(num_rows, num_tokens, seconds, on_ranks=on_ranks)
        self._probe_seconds += _PROBE_TIME * seconds

    def may_probe(self, num_rows: int) -> bool:
        """Whether there is time to verify drafts that do not seem to pay off."""
        more = self.costs(num_rows, num_rows + PROBE_DRAFTS) - self.costs(num_rows, num_rows)
        if more > self._probe_seconds:
            return False
        self._probe_seconds = 0.0
        return True

    def choose(
        self,
        shares: Sequence[float],
        most: Sequence[int],
        num_rows: int,
        budget: int,
        *,
        on_ranks: bool = False,
    ) -> list[int]:
        """The number of drafts of each proposal, in a step of ``num_rows`` requests.

        ``shares``: the acceptance of each proposal. ``most``: its number of tokens. All together
        get at most ``budget``. ``on_ranks``: ranks draft some of them, which takes time.
        """
        plain = self.costs(num_rows, num_rows)
        if not plain:  # measure a step without drafts first
            return [0] * len(shares)
        logs = [log(share) for share in shares]
        fair = max(budget // len(shares), 1)
        best = Choice([0] * len(shares), _LEAST_GAIN * num_rows / plain)
        for cut in _LOG_CUTS:
            lengths, left, tokens = [], budget, float(num_rows)
            for share, log_share, limit in zip(shares, logs, most, strict=True):
                length = min(int(cut / log_share), limit, fair, left)
                left -= length
                lengths.append(length)
                tokens += share * (1 - share**length) / (1 - share)
            if left == budget:
                break  # later cuts allow even less
            speed = tokens / self.costs(num_rows, num_rows + budget - left, on_ranks=on_ranks)
            if speed > best.speed:
                best = Choice(lengths, speed)
        return best.lengths
