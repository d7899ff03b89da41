"""Divides what decodes leave of a step among prompts, in progress and waiting.

While requests come that overtake others, steps without one of their prompts are kept short
(``short_step_tokens``): a step cannot be interrupted, so the next such request waits for the one
that runs. And a step with the prompt of such a request runs no other prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdk.engine.pages.groups import Groups
from sdk.engine.plan import Encoding
from sdk.engine.scheduling.admission import Admission, PromptBudget, tokens_of
from sdk.engine.scheduling.images import Images
from sdk.engine.scheduling.negative_prompt import share
from sdk.engine.scheduling.queues import RequestQueues
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler_config import SchedulerConfig

#: Steps stay short for this many seconds after a request that overtook others.
_EXPECTED_S = 60.0


class PromptSteps:
    """Plans the prompts of steps."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        admission: Admission,
        groups: Groups | None = None,
        images: Images | None = None,
    ) -> None:
        self._config = config
        self._images = images
        self._groups = groups
        self._queues = queues
        self._admission = admission

    def plan(
        self, prefills: Sequence[Request], tokens: int, hard: int, decodes: bool, *, may_start: bool
    ) -> tuple[list[tuple[Request, int]], list[Request], Encoding | None]:
        """Sequences with the tokens that each runs, the requests started, and what the tower does.

        ``prefills``: running prompts, in order. ``tokens``: how many of them should run at most;
        ``hard``: how many may, where a step must have more. ``decodes``: whether other requests
        decode; then a step has tokens of prompts or a portion of the tower's work, in turns.
        ``may_start``: whether waiting requests may start.
        """
        images, queues = self._images, self._queues
        if images is None:
            return *self._plan(prefills, tokens, hard, decodes, may_start=may_start), None
        parts: list[tuple[Request, int]] = []
        started: list[Request] = []
        turn = decodes and not images.encoded_last and images.is_due(queues.running)
        if not turn:
            parts, started = self._plan(prefills, tokens, hard, decodes, may_start=may_start)
        encoding = None
        if turn or not (decodes and parts):
            encoding = images.plan(queues.running, queues.waiting)
        images.encoded_last = turn or encoding is not None
        return parts, started, encoding

    def _plan(
        self, prefills: Sequence[Request], tokens: int, hard: int, decodes: bool, *, may_start: bool
    ) -> tuple[list[tuple[Request, int]], list[Request]]:
        """See :meth:`plan`."""
        queues, budget = self._queues, self._budget(tokens, decodes)
        budget.hard = hard
        groups, images = self._groups, self._images
        parts: list[tuple[Request, int]] = []
        started: list[Request] = []

        def admit(ahead_of: Request | None) -> None:
            if may_start and queues.waiting and budget.tokens:
                for request, shares in self._admission.admit(budget, queues.clock(), ahead_of):
                    started.append(request)
                    parts.extend(shares)

        for request in prefills:
            if queues.policy.preemptive:
                admit(request)
            most = tokens_of(request, budget, images, groups)
            shares = share(request, most) if most else ()
            for part in shares:
                if groups is not None:
                    groups.grow(*part)
                budget.take(request, part[1])
                parts.append(part)
        admit(None)
        return parts, started

    def _budget(self, tokens: int, decodes: bool) -> PromptBudget:
        # A scored row costs the head's product and a pass over the logits: 256 of them would delay
        # the requests that decode. Without such requests there is no limit.
        config, queues = self._config, self._queues
        if not config.enable_chunked_prefill:
            return PromptBudget(tokens, tokens)
        budget = PromptBudget(tokens, config.max_scored_tokens if decodes else tokens)
        if queues.policy.preemptive and queues.clock() - queues.overtaken_at < _EXPECTED_S:
            # a request with a negative prompt starts with a token of each of its two sequences
            budget.patient = max(config.short_step_tokens, 2)
        return budget
