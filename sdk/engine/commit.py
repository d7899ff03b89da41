"""What a finished step means for its requests: the only place where one advances."""

from __future__ import annotations

import time
from collections.abc import Callable

from sdk.engine.plan import Sampled, StepPlan, StepResult
from sdk.engine.queues import Queues, RequestUpdate
from sdk.engine.request import Request, RequestStatus
from sdk.engine.scheduler_config import SchedulerConfig

_RUNNING = RequestStatus.RUNNING


class Commits(Queues):
    """Queues whose running requests advance by what a step computed."""

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        #: Unless empty, the plan is the rows of the last one again: the tokens they go on with.
        self.next_tokens: list[int] = []
        #: Steady requests get a page so many steps before they need it.
        self.pages_ahead = 0

    def commit(self, plan: StepPlan, result: StepResult | list[int]) -> list[RequestUpdate]:
        """Advance the requests of ``plan`` by what came out; returns those with news."""
        step_id = plan.step_id if isinstance(result, list) else result.step_id
        if plan is not self._plan or step_id != plan.step_id:
            expected = "none" if self._plan is None else self._plan.step_id
            raise RuntimeError(
                f"commit of plan {plan.step_id} with the result of step {step_id}; "
                f"the step in flight is {expected}"
            )
        self.pool.settle()
        now = self.clock()
        updates, self._expired = self._expired, []
        in_flight, self._plan = self._in_flight, None
        if isinstance(result, list):
            self._commit_tokens(in_flight, result, now, updates)
            return updates
        if result.unwritten:
            self.prefixes.swap.lose(result.unwritten)
        page_size = self.config.page_size
        errors, prompt_logprobs = result.errors, result.prompt_logprobs
        for request, num in in_flight:
            if request.status is not _RUNNING:
                continue  # aborted while the step ran
            if errors and request.request_id in errors:
                self._fail(request, errors[request.request_id], updates)
                continue
            before = request.num_computed
            after = request.num_computed = before + num
            if before < request.num_prompt_tokens:
                self.num_prompt_tokens += min(after, request.num_prompt_tokens) - before
            if request.publishes and after // page_size > request.num_published:
                self.prefixes.publish(request, after // page_size)
            scored: tuple[Sampled, ...] = ()
            if prompt_logprobs and request.request_id in prompt_logprobs:
                # After a preemption the first positions come a second time.
                known = max(0, request.num_prompt_scored - before)
                scored = prompt_logprobs[request.request_id][known:]
                request.num_prompt_scored += len(scored)
            if after == len(request.token_ids):
                self._complete(request, result, scored, now, updates)
            elif scored:
                updates.append(RequestUpdate(request, None, scored))
        if self._steady:
            self.next_tokens = [request.token_ids[-1] for request, _ in in_flight]
            self._full = [request for request, _ in in_flight if self._lacks_page(request)]
        else:
            self._in_flight = []
        return updates

    def _commit_tokens(
        self,
        in_flight: list[tuple[Request, int]],
        tokens: list[int],
        now: float,
        updates: list[RequestUpdate],
    ) -> None:
        """Commit a plan that was the last one once more: a token for each, and nothing else."""
        page_size, ahead = self.config.page_size, self.pages_ahead
        full: list[Request] = []
        row = -1
        for request, _ in in_flight:
            row += 1
            if request.status is not _RUNNING:
                continue  # aborted while the step ran
            token_id, known = tokens[row], request.token_ids
            after = request.num_computed = len(known)
            if not after % page_size and request.publishes:
                self.prefixes.publish(request, after // page_size)
            if (after + ahead) % page_size <= ahead and self._lacks_page(request):
                full.append(request)
            known.append(token_id)
            self.num_generation_tokens += 1
            request.last_token_ts = now
            if (
                request.watched
                or token_id in request.stop_token_ids
                or len(known) >= request.max_len
            ):
                self._report(request, Sampled(token_id), (), updates)
        if self._steady:
            self.next_tokens, self._full = tokens, full
        else:
            self._in_flight = []

    def _lacks_page(self, request: Request) -> bool:
        """Whether a request needs a page more; its last token is never read back."""
        needed = min(request.num_computed + self.pages_ahead, request.max_len - 2)
        return len(request.pages) * self.config.page_size <= needed

    def _complete(
        self,
        request: Request,
        result: StepResult,
        scored: tuple[Sampled, ...],
        now: float,
        updates: list[RequestUpdate],
    ) -> None:
        """All known tokens have run: there is a next token, or the embedding."""
        request_id = request.request_id
        if request.kind == "embed":
            hidden = result.hidden.get(request_id)
            if hidden is None:
                self._fail(request, "the step returned no embedding", updates)
                return
            self._end(request, "stop")
            updates.append(RequestUpdate(request, None, scored, hidden))
            return
        sampled = result.sampled.get(request_id)
        if sampled is None:
            self._fail(request, "the step returned no token", updates)
            return
        request.token_ids.append(sampled.token_id)
        if request.guide is not None:
            request.guide.token_ids.append(sampled.token_id)
        request.mirostat_mu = sampled.mirostat_mu
        self.num_generation_tokens += 1
        request.last_token_ts = now
        if request.first_token_ts is None:
            request.first_token_ts = now
        self._report(request, sampled, scored, updates)

    def _report(
        self,
        request: Request,
        sampled: Sampled,
        scored: tuple[Sampled, ...],
        updates: list[RequestUpdate],
    ) -> None:
        """A request has one more token: end it where that was the last, tell who watches."""
        token_id = sampled.token_id
        if (
            token_id in request.stop_token_ids
            and request.num_output_tokens >= request.params.min_tokens
        ):
            is_eos = token_id in self.config.eos_token_ids and not request.params.ignore_eos
            self._end(request, "stop", None if is_eos else token_id)
        elif len(request.token_ids) >= request.max_len:
            self._end(request, "length")
        elif not (request.watched or scored):
            return
        updates.append(RequestUpdate(request, sampled, scored))

    def _fail(self, request: Request, message: str, updates: list[RequestUpdate]) -> None:
        """End one request in error. Its pages may hold NaN: nobody must find them in the cache."""
        for sequence in request.sequences:
            self.prefixes.distrust(sequence)
        self._end(request, "error", message)
        updates.append(RequestUpdate(request))
