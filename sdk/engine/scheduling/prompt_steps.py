"""Divides what decodes leave of a step among prompts, in progress and waiting.

While requests come that overtake others, steps without one of their prompts are kept short
(``short_step_tokens``): a step cannot be interrupted, so the next such request waits for the one
that runs. And a step with the prompt of such a request runs no other prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdk.engine.pages.groups import Groups
from sdk.engine.scheduling.admission import Admission, PromptBudget
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
    ) -> None:
        self._config = config
        self._groups = groups
        self._queues = queues
        self._admission = admission

    def plan(
        self, prefills: Sequence[Request], tokens: int, decodes: bool, *, may_start: bool
    ) -> tuple[list[tuple[Request, int]], list[Request]]:
        """Sequences with the tokens that each runs, at most ``tokens``, and the requests started.

        ``prefills``: running prompts, in order. ``decodes``: whether other requests decode.
        ``may_start``: whether waiting requests may start.
        """
        queues, budget = self._queues, self._budget(tokens, decodes)
        groups = self._groups
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
            most = budget.most(request)
            if most and groups is not None:
                most = groups.most_tokens(request, most)
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
