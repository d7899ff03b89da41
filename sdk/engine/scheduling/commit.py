"""Applies a finished step to its requests. Requests advance nowhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sdk.api.logprobs import Sampled
from sdk.api.outputs import RequestEvent
from sdk.engine.pages.prefixes import Prefixes
from sdk.engine.plan import Pooled, StepResult
from sdk.engine.recorder import MetricsRecorder
from sdk.engine.scheduling.images import Images
from sdk.engine.scheduling.in_flight import Batch, InFlightBatches
from sdk.engine.scheduling.queues import RequestQueues, RequestUpdate
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.engine.scheduling.scheduler_config import SchedulerConfig

_RUNNING = RequestStatus.RUNNING
_NEVER = math.nan


class Committer:
    """Commits the batches in flight, in the order of their plans."""

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        prefixes: Prefixes,
        in_flight: InFlightBatches,
        recorder: MetricsRecorder,
    ) -> None:
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        #: Draft tokens that were run, and how many of them were accepted.
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self._config = config
        self._queues = queues
        self._prefixes = prefixes
        self._has_states = prefixes.has_states
        self._in_flight = in_flight
        self._recorder = recorder
        #: Of the last step: the requests that got a token ``interval`` after the one before.
        self.num_together, self.interval = 0, 0.0

    def commit(self, result: StepResult, ahead: int) -> list[RequestUpdate]:
        """Advance the oldest batch's requests; returns updates. ``ahead``: ``pages_ahead``."""
        batch, in_flight, has_states = self._take(result), self._in_flight, self._has_states
        now, updates = self._queues.clock(), self._queues.take_expired()
        page_size, repeats = self._config.page_size, in_flight.repeatable is batch
        errors, details, prompt_logprobs = result.errors, result.details, result.prompt_logprobs
        rows, found, forced, needs = batch.plan.rows, result.tokens, result.forced, self._needs_page
        need_page: list[Request] = []
        earlier, together, index = _last_token(batch.sequences), 0, -1  # zip(): 25 us more
        for request in batch.sequences:
            index += 1
            if request.status is not _RUNNING:
                continue  # aborted while the step ran
            request_id, num, num_output_rows, drafts, _ = rows[index]
            if errors and request_id in errors:
                self._fail(request, errors[request_id], updates)
                continue
            tokens: Sequence[int] = ()
            before = request.num_computed
            if num_output_rows and request.spec.negative_of is None:
                if not (tokens := found[index] if found else ()):
                    self._fail(request, "the step returned no token", updates)
                    continue
                if drafts:
                    tokens = self._accepted(request, drafts, tokens)
                    num += len(tokens) - 1 - len(drafts)
                request.token_ids += tokens
                if forced:
                    request.forced = forced.get(request_id, ())
            after = request.num_computed = before + num
            if before < request.num_prompt_tokens or num > 1:
                self._ran(request, before, num, bool(drafts), batch.planned_ts, now)
            if request.publishes and after // page_size > request.num_published:
                self._publish(request, after)
            if has_states:
                self._prefixes.ran(request, num, bool(drafts))
            scored = self._scored(request, before, prompt_logprobs) if prompt_logprobs else ()
            if not tokens:
                if request.spec.kind == "embed" or scored:
                    self._report_prompt(request, result.hidden.get(request_id), scored, updates)
                continue
            if repeats and (after + ahead) % page_size <= ahead and needs(request, ahead):
                need_page.append(request)
            self.num_generation_tokens += len(tokens)
            if request.last_token_ts is earlier:  # the same object: of the same step
                together += 1
            else:
                self._note_interval(request, now)
            request.last_token_ts = now
            if request.negative is not None:
                request.negative.token_ids += tokens
            ends = tokens[-1] in request.stop_token_ids or len(request.token_ids) >= request.max_len
            if result.complete and request_id in result.complete:
                request.closed = result.complete[request_id]
                self._report_complete(request, tokens, details.get(request_id), scored, updates)
            elif ends or request.watched or scored or details:
                self._report(request, tokens, details.get(request_id), scored, updates)
        if repeats and in_flight.repeatable is batch:
            saves = self._prefixes.need_save(batch.sequences) if has_states else []
            in_flight.need_page, in_flight.need_save = need_page, saves
        self.num_together, self.interval = together, now - earlier
        return updates

    def _note_interval(self, request: Request, now: float) -> None:
        """A request has its first token, or one whose predecessor is not as old as the others'."""
        if request.last_token_ts is None:
            request.first_token_ts = now
            self._recorder.first_token(request, now)
        else:
            self._recorder.inter_token_latency.add(now - request.last_token_ts)

    def _ran(
        self, request: Request, before: int, num: int, drafts: bool, begun: float, now: float
    ) -> None:
        """``num`` tokens after the first ``before`` ran: count those of the prompt. If all were
        known before, that is an event."""
        left = request.num_prompt_tokens - before
        if left > 0:
            self.num_prompt_tokens += min(num, left)
        if not drafts:
            request.note(RequestEvent(begun, "prefill", num, seconds=now - begun))

    def _publish(self, request: Request, num_computed: int) -> None:
        """Publish the pages that are full of tokens which stay."""
        num_full = min(num_computed, request.num_certain) // self._config.page_size
        if num_full > request.num_published:
            self._prefixes.publish(request, num_full)

    def _take(self, result: StepResult) -> Batch:
        """Remove and return the oldest batch in flight."""
        batches = self._in_flight.batches
        batch = batches[0] if batches else None
        if batch is None or result.step_id != batch.plan.step_id:
            expected = "none is in flight" if batch is None else f"expected {batch.plan.step_id}"
            raise RuntimeError(f"commit: found the result of step {result.step_id}; {expected}")
        batches.popleft()
        if not batches:
            self._prefixes.pool.confirm_copies()
        if result.unwritten:
            self._prefixes.swap.drop_unwritten(result.unwritten)
        if result.mask_seconds:
            for request in batch.sequences:
                if request.spec.resolved.grammar is not None:
                    request.mask_seconds += result.mask_seconds
        if result.left_out:
            for request in batch.sequences:
                request.is_drafted &= request.request_id not in result.left_out
        return batch

    def _scored(
        self, request: Request, begin: int, prompts: Mapping[str, tuple[Sampled, ...]]
    ) -> tuple[Sampled, ...]:
        """The new scores of a prompt, from the token after ``begin`` on. The first ones may be
        known already, because a preempted request computes them again.
        """
        scored = prompts.get(request.request_id, ())[max(0, request.num_prompt_scored - begin) :]
        request.num_prompt_scored += len(scored)
        return scored

    def _needs_page(self, request: Request, ahead: int) -> bool:
        """Whether a request needs one more page; its last token is never read back."""
        needed = min(request.num_computed + ahead, request.max_len - 2)
        return len(request.pages) * self._config.page_size <= needed

    def _accepted(
        self, request: Request, drafts: Sequence[int], tokens: Sequence[int]
    ) -> Sequence[int]:
        """The accepted tokens after drafts, up to the one that ends the answer."""
        self.num_draft_tokens += len(drafts)
        # The last token was not a draft, unless a structured answer is complete with one.
        accepted = len(tokens) - (tuple(tokens) != drafts[: len(tokens)])
        self.num_accepted_tokens += accepted
        request.num_draft_tokens += len(drafts)
        request.num_accepted_tokens += accepted
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
        hidden: Pooled | None,
        scored: tuple[Sampled, ...],
        updates: list[RequestUpdate],
    ) -> None:
        """More of a prompt has run: report its scores, or its embedding at the end."""
        if request.spec.kind != "embed" or request.num_computed < len(request.token_ids):
            if scored:
                updates.append(RequestUpdate(request, (), scored))
            return
        if hidden is None:
            self._fail(request, "the step returned no embedding", updates)
            return
        self._queues.end(request, "stop")
        updates.append(RequestUpdate(request, (), scored, hidden))

    def _report(
        self,
        request: Request,
        tokens: Sequence[int],
        details: Sequence[Sampled] | None,
        scored: tuple[Sampled, ...],
        updates: list[RequestUpdate],
    ) -> None:
        """Report a request's new tokens; end the request if the last token ends it."""
        token_id = tokens[-1]
        if details is not None:
            request.mirostat_mu = details[-1].mirostat_mu
        if (
            token_id in request.stop_token_ids
            and request.num_output_tokens >= request.params.min_tokens
        ):
            is_eos = token_id in self._config.eos_token_ids and not request.params.ignore_eos
            self._queues.end(request, "stop", None if is_eos else token_id)
        elif len(request.token_ids) >= request.max_len:
            self._queues.end(request, "length")
        elif not (request.watched or scored):
            return
        sampled = [Sampled(token) for token in tokens] if details is None else details
        updates.append(RequestUpdate(request, sampled[: len(tokens)], scored))

    def _report_complete(
        self,
        request: Request,
        tokens: Sequence[int],
        details: Sequence[Sampled] | None,
        scored: tuple[Sampled, ...],
        updates: list[RequestUpdate],
    ) -> None:
        """Report the last tokens of a structured answer. It needs no token that ends it."""
        ends = tokens[-1] in request.stop_token_ids | self._config.eos_token_ids
        request.is_complete = not ends
        is_eos = tokens[-1] in self._config.eos_token_ids
        self._queues.end(request, "stop", tokens[-1] if ends and not is_eos else None)
        sampled = [Sampled(token) for token in tokens] if details is None else details
        updates.append(RequestUpdate(request, sampled[: len(tokens)], scored))

    def commit_images(
        self, images: Images, batch: Batch, result: StepResult
    ) -> list[RequestUpdate]:
        """The tower has done its part of a step. What cannot be encoded ends its requests."""
        updates: list[RequestUpdate] = []
        for key, why in images.commit(batch, result, self._queues.clock()).items():
            for request in images.readers(key, self._queues.running):
                self._fail(request, why, updates)
        return updates

    def _fail(self, request: Request, message: str, updates: list[RequestUpdate]) -> None:
        """End one request in error. Its pages may hold NaN, so they must not stay in the cache."""
        for sequence in request.sequences:
            self._prefixes.invalidate(sequence)
        self._queues.end(request, "error", message)
        updates.append(RequestUpdate(request))

    def shorten(self, request: Request, num_tokens: int) -> None:
        """Drop the tokens of a finished request after the one that ended it."""
        self.num_generation_tokens -= len(request.token_ids) - num_tokens
        del request.token_ids[num_tokens:]


def _last_token(sequences: Sequence[Request]) -> float:
    """When the first sequence got its last token; most of the others in a step that decodes got
    theirs in the same step."""
    last = sequences[0].last_token_ts if sequences else None
    return _NEVER if last is None else last
