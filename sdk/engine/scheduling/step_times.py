"""The time of a step by what it runs: measured, for forecasts of all steps to come.

``StepCosts`` chooses the size of one step for a host that has little time, ``DecodeCosts`` the
number of drafts. Here a step of ``rows`` decoding requests and ``tokens`` of prompts takes::

    decode(rows) + per_token * tokens + per_pair * pairs

``pairs``: how many keys the tokens of prompts read, summed. ``decode`` is a curve of averages.
Steps that repeat one another are measured together, between the steps that are planned request by
request, so that a repeated step costs nothing.
"""

from __future__ import annotations

from sdk.engine.scheduling.decode_costs import Curve

#: Each new measurement multiplies the weight of older ones by this.
_DECAY = 0.95
#: Without measurements of long contexts, reading keys is taken to cost nothing.
_PRIOR = 1e-3


class StepTimes:
    """How long steps take, by what they run, in seconds of the scheduler's clock.

    Times contain what the host does between two steps.
    """

    def __init__(self) -> None:
        self._decode = Curve()
        self._count = 0
        self._sums = [0.0] * 5  # weighted: tokens^2, tokens * pairs, pairs^2, products with seconds
        #: Tokens of an answer that a decoding request gets in a step: more than 1 with drafts.
        self.tokens_per_row = 1.0
        #: Weighted mean of the relative error of predicted times.
        self.error = 0.25
        #: Weighted mean of the last steps, of any kind.
        self.step = 0.0
        self._segment: tuple[float, int, int, int, float, int] | None = None

    @property
    def known(self) -> bool:
        """Whether steps with prompts and steps that decode were measured."""
        return bool(self._decode.sizes) and self._sums[0] > 0

    def decode(self, rows: int) -> float:
        """A step in which this many requests decode."""
        if not rows or not self._decode.sizes:
            return 0.0
        return self._decode(rows)

    def prompt(self, tokens: int, context: float) -> float:
        """What ``tokens`` of a prompt add to a step, after ``context`` tokens."""
        per_token, per_pair = self.slopes()
        return per_token * tokens + per_pair * tokens * (context + tokens / 2)

    def fixed(self) -> float:
        """A step with prompts only takes at least as long as one decoding request."""
        return self.decode(1)

    def begin(
        self, now: float, step: int, rows: int, tokens: int, pairs: float, generated: int
    ) -> None:
        """Step number ``step`` begins, and may be repeated. ``generated``: tokens of answers so
        far, of all requests."""
        self._segment = now, step, rows, tokens, pairs, generated

    def end(self, now: float, step: int, generated: int) -> None:
        """The steps before number ``step`` have ended."""
        if self._segment is None:
            return
        begin, first, rows, tokens, pairs, before = self._segment
        self._segment = None
        count = step - first
        if count <= 0 or now <= begin:
            return
        seconds = (now - begin) / count
        self._learn_error(rows, tokens, pairs, seconds)
        weight = 1 - _DECAY**count if self._count else 1.0
        self.step += weight * (seconds - self.step)
        self._count += 1
        if not tokens:
            if rows:
                self._decode.learn(rows, seconds, self._count)
                per_row = (generated - before) / (rows * count)
                self.tokens_per_row += 0.1 * (max(per_row, 1.0) - self.tokens_per_row)
            return
        rest = max(seconds - (self.decode(rows) or self.fixed()), 0.1 * seconds)
        products = tokens**2, tokens * pairs, pairs**2, tokens * rest, pairs * rest
        sums = zip(self._sums, products, strict=True)
        self._sums = [_DECAY * total + new for total, new in sums]

    def _learn_error(self, rows: int, tokens: int, pairs: float, seconds: float) -> None:
        if not self.known:
            return
        expected = self.decode(rows) or self.fixed()
        if tokens:
            per_token, per_pair = self.slopes()
            expected += per_token * tokens + per_pair * pairs
        if expected > 0:
            self.error += 0.05 * (min(abs(seconds / expected - 1), 2.0) - self.error)

    def slopes(self) -> tuple[float, float]:
        """Seconds per token and per pair, by least squares; neither is negative."""
        tokens2, both, pairs2, with_tokens, with_pairs = self._sums
        if not tokens2:
            return 0.0, 0.0
        pairs2 += _PRIOR * pairs2
        determinant = tokens2 * pairs2 - both**2
        if determinant > 0:
            per_pair = (tokens2 * with_pairs - both * with_tokens) / determinant
            if per_pair > 0:
                per_token = (with_tokens - per_pair * both) / tokens2
                if per_token > 0:
                    return per_token, per_pair
        return with_tokens / tokens2, 0.0
