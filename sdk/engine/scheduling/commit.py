"""What a finished step means for its requests: the only place where one advances."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sdk.engine.plan import Sampled, StepResult
from sdk.engine.scheduling.queues import Batch, Queues, RequestUpdate
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.engine.scheduling.scheduler_config import SchedulerConfig

_RUNNING = RequestStatus.RUNNING


class Commits(Queues):
    """Queues whose running requests advance by what a step computed."""

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        #: Steady requests get a page so many steps before they need it.
        self.pages_ahead = 0
        #: Draft tokens that were run, and those of them that were right.
        self.num_draft_tokens = self.num_accepted_tokens = 0

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Advance the requests of the oldest plan in flight; returns those with news."""
        batch = self._land(result)
        now = self.clock()
        updates, self._expired = self._expired, []
        page_size, ahead, steady = self.config.page_size, self.pages_ahead, self._steady is batch
        errors, details, prompt_logprobs = result.errors, result.details, result.prompt_logprobs
        rows, found = batch.plan.rows, result.tokens
        full: list[Request] = []
        index = -1  # zip(strict=True) costs 25 us after a step (docs/log.md)
        for request in batch.sequences:
            index += 1
            if request.status is not _RUNNING:
                continue  # aborted while the step ran
            request_id, num, num_outputs, drafts, _ = rows[index]
            if errors and request_id in errors:
                self._fail(request, errors[request_id], updates)
                continue
            tokens: Sequence[int] = ()
            before = request.num_computed
            if num_outputs and request.guides is None:
                tokens = found[index] if found else ()
                if not tokens:
                    self._fail(request, "the step returned no token", updates)
                    continue
                if drafts:
                    tokens = self._accepted(request, drafts, tokens)
                    num += len(tokens) - 1 - len(drafts)
                request.token_ids += tokens
            after = request.num_computed = before + num
            if before < request.num_prompt_tokens:
                self.num_prompt_tokens += min(after, request.num_prompt_tokens) - before
            if request.publishes and after // page_size > request.num_published:
                self.prefixes.publish(request, after // page_size)
            scored: tuple[Sampled, ...] = ()
            if prompt_logprobs and request_id in prompt_logprobs:
                scored = self._scored(request, before, prompt_logprobs[request_id])
            if not tokens:
                if request.kind == "embed" or scored:
                    self._report_prompt(request, result.hidden.get(request_id), scored, updates)
                continue
            if steady and (after + ahead) % page_size <= ahead and self._lacks_page(request):
                full.append(request)
            self.num_generation_tokens += len(tokens)
            request.last_token_ts = now
            if request.first_token_ts is None:
                request.first_token_ts = now
            if request.guide is not None:
                request.guide.token_ids += tokens
            if (
                request.watched
                or scored
                or details
                or tokens[-1] in request.stop_token_ids
                or len(request.token_ids) >= request.max_len
            ):
                self._report(request, tokens, details.get(request_id), scored, updates)
        if steady and self._steady is batch:
            self._full = full
        return updates

    def _land(self, result: StepResult) -> Batch:
        """The oldest batch in flight, which is no more."""
        batch = self._launched[0] if self._launched else None
        if batch is None or result.step_id != batch.plan.step_id:
            expected = "there is none" if batch is None else f"the oldest is {batch.plan.step_id}"
            raise RuntimeError(
                f"commit of the result of step {result.step_id}; of those in flight {expected}"
            )
        self._launched.popleft()
        if not self._launched:
            self.pool.settle()
        if result.unwritten:
            self.prefixes.swap.lose(result.unwritten)
        return batch

    def _scored(
        self, request: Request, begin: int, found: tuple[Sampled, ...]
    ) -> tuple[Sampled, ...]:
        """What is new of the scores of a prompt from the token behind ``begin`` on: after a
        preemption the first come a second time.
        """
        scored = found[max(0, request.num_prompt_scored - begin) :]
        request.num_prompt_scored += len(scored)
        return scored

    def _lacks_page(self, request: Request) -> bool:
        """Whether a request needs a page more; its last token is never read back."""
        needed = min(request.num_computed + self.pages_ahead, request.max_len - 2)
        return len(request.pages) * self.config.page_size <= needed

    def _accepted(
        self, request: Request, drafts: Sequence[int], tokens: Sequence[int]
    ) -> Sequence[int]:
        """The tokens of an answer that went on behind drafts, up to the one that ends it."""
        self.num_draft_tokens += len(drafts)
        self.num_accepted_tokens += len(tokens) - 1
        stops, least = request.stop_token_ids, request.params.min_tokens
        known, count = request.num_output_tokens, 0
        for token_id in tokens:
            count += 1
            if token_id in stops and known + count >= least:
                break
        return tokens[:count]

    def _report_prompt(
        self,
        request: Request,
        hidden: list[float] | None,
        scored: tuple[Sampled, ...],
        updates: list[RequestUpdate],
    ) -> None:
        """More of a prompt has run: it is scored, or the embedding is there."""
        if request.kind != "embed" or request.num_computed < len(request.token_ids):
            if scored:
                updates.append(RequestUpdate(request, (), scored))
            return
        if hidden is None:
            self._fail(request, "the step returned no embedding", updates)
            return
        self._end(request, "stop")
        updates.append(RequestUpdate(request, (), scored, hidden))

    def _report(
        self,
        request: Request,
        tokens: Sequence[int],
        details: Sequence[Sampled] | None,
        scored: tuple[Sampled, ...],
        updates: list[RequestUpdate],
    ) -> None:
        """A request has more tokens: end it where the last one does, tell who watches."""
        token_id = tokens[-1]
        if details is not None:
            request.mirostat_mu = details[-1].mirostat_mu
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
        sampled = [Sampled(token) for token in tokens] if details is None else details
        updates.append(RequestUpdate(request, sampled[: len(tokens)], scored))

    def _fail(self, request: Request, message: str, updates: list[RequestUpdate]) -> None:
        """End one request in error. Its pages may hold NaN: nobody must find them in the cache."""
        for sequence in request.sequences:
            self.prefixes.distrust(sequence)
        self._end(request, "error", message)
        updates.append(RequestUpdate(request))
