"""How many tokens a step may have, so that it ends before other callers have waited too long."""

from __future__ import annotations

import time

from sdk.engine.scheduling.images import PORTION_S
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.step_costs import StepCosts

#: Seconds within which a step that mixes a prompt with decoding requests should end. 256 tokens at
#: the end of a prompt of 7,000 took 1.2 s. Each step takes longer than the last, because the
#: context has grown.
MIXED_STEP_S = 0.35
#: Such a step may always have this many tokens. Reading the weights, once per step, then takes a
#: tenth of the time, whatever the model's size (0.5 bytes/weight, 20 GB/s, 0.5e12 operations/s).
MIN_MIXED_TOKENS = 64
#: Seconds after a call of ``pump`` in which the next call is expected.
_PUMP_EXPECTED_S = 1.0


class StepSizes:
    """The token limits of one engine's steps, learned from the steps before."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._costs = StepCosts()  # of the steps that pump runs
        self._tokens_per_second: float | None = None  # of the engine thread's last large step
        self._pump: tuple[float, float] | None = None  # its seconds, and until when they count

    @property
    def pumped(self) -> bool:
        """Whether the host pumps, as far as is known."""
        return self._pump is not None

    def begin_pump(self, seconds: float) -> None:
        """The host calls ``pump`` for ``seconds`` and is expected to do so again soon."""
        self._pump = seconds, time.monotonic() + _PUMP_EXPECTED_S

    def for_pump(self, end: float, *, first: bool) -> int | None:
        """The most tokens of a step that must end by ``end``, on the monotonic clock.

        ``None``: no step fits. The ``first`` step of a pump always runs.
        """
        seconds = end - time.monotonic()
        self._limit_portions(seconds)
        if first:
            return self._costs.first_tokens(seconds)
        most = self._costs.most_tokens(seconds)
        return None if most < self._scheduler.least_tokens else most

    def learn_from_pump(self, tokens: int, seconds: float) -> None:
        """Learn what a step of ``pump`` took; 0 tokens: nothing ran."""
        if tokens:
            self._costs.learn(tokens, seconds)

    def for_engine_thread(self) -> int | None:
        """The most tokens of the engine thread's next step; ``None``: as many as are allowed.

        Prompts make it no longer than a host that pumps, or a decoding request, can wait.
        """
        if self._pump is not None:
            seconds, until = self._pump
            if time.monotonic() < until:
                self._limit_portions(seconds)
                return self._costs.first_tokens(seconds)
            self._pump = None
            self._limit_portions(PORTION_S)
            return None
        if not self._scheduler.decodes or self._tokens_per_second is None:
            return None
        return max(int(self._tokens_per_second * MIXED_STEP_S), MIN_MIXED_TOKENS)

    def _limit_portions(self, seconds: float) -> None:
        """Images are encoded for so long between two steps."""
        if self._scheduler.images is not None:
            self._scheduler.images.seconds = max(min(seconds, PORTION_S), 0.0)

    def learn_from_engine_thread(self, tokens: int, seconds: float) -> None:
        """Learn the speed of large steps."""
        if tokens >= MIN_MIXED_TOKENS:
            self._tokens_per_second = tokens / seconds


def mixed_step_tokens(scheduler: Scheduler) -> int:
    """The most tokens of a step with prompts, as expected from the step times that were measured:
    fewer while requests decode."""
    most = scheduler.config.max_num_batched_tokens
    per_token = scheduler.times.prompt(1, 0)
    if scheduler.queues.running and per_token > 0:
        most = min(most, max(int(MIXED_STEP_S / per_token), MIN_MIXED_TOKENS))
    return most
