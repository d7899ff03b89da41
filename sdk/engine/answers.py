"""Turns sampled tokens into outputs: text, stop strings, log-probabilities.

``JobAnswers`` are the ``n`` (or ``best_of``) answers of one job. The scheduler decides whether an
answer continues.
"""

from __future__ import annotations

from operator import attrgetter

from sdk.api.logprobs import Sampled, Texts
from sdk.api.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    FinishReason,
    Logprobs,
    PoolingOutput,
    PoolingRequestOutput,
    RequestMetrics,
    RequestOutput,
)
from sdk.api.params import RequestOutputKind
from sdk.api.timeline import RequestEvent, merged_events
from sdk.engine.job import Job
from sdk.engine.plan import Pooled
from sdk.engine.rewinds import Rewinder
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.engine.scheduling.results import ResultReservation
from sdk.quant.tokenizer import Tokenizer
from sdk.text.automaton import StringAutomaton
from sdk.text.detokenizer import IncrementalDetokenizer
from sdk.text.stops import StopMatcher, StopStrings

Events = tuple[RequestEvent, ...]
_STOP = RequestStatus.STOP
_REASON = attrgetter("finish_reason")


class Answer:
    """One answer: text and log-probabilities of its request's tokens. Finds stop strings.

    A watched request (:func:`is_watched`) is detokenized at every token, any other at its end. The
    text contains no characters that may turn out to be part of a stop string. With banned strings
    it gets the tokens that ``rewinder`` has let pass.
    """

    __slots__ = (
        "_detokenizer",
        "_end_returned",
        "_num_returned",
        "_stopped",
        "_stops",
        "_text",
        "_texts",
        "cumulative_logprob",
        "embedding",
        "finish_reason",
        "finished_ts",
        "index",
        "logprobs",
        "num_read",
        "request",
        "rewinder",
        "stop_reason",
    )

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer | None,
        stops: StopStrings | None,
        texts: Texts | None,
        banned: StringAutomaton | None = None,
    ) -> None:
        params = request.params
        self.index = index
        self.request = request
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self.embedding: Pooled | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.finished_ts: float | None = None
        self._texts = texts
        self._detokenizer: IncrementalDetokenizer | None = None
        self._stops: StopMatcher | None = None
        if tokenizer is not None and params.detokenize and request.spec.kind == "generate":
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids=request.token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                healed_bytes=0
                if (healing := request.spec.resolved.healing) is None
                else len(healing.text),
            )
            if stops is not None:
                self._stops = StopMatcher(stops, params.include_stop_str_in_output)
        self.rewinder: Rewinder | None = None
        if banned is not None and self._detokenizer is not None:
            stopping = None if self._stops is None else self._stops.copy()
            self.rewinder = Rewinder(request, banned, self._detokenizer.copy(), stopping)
        self._stopped = False  # at a stop string; later text is dropped
        self._text = ""  # with DELTA outputs only what is not returned yet, else all
        self.num_read = request.num_prompt_tokens  # tokens already turned into text
        self._num_returned = request.num_prompt_tokens  # for DELTA: tokens in earlier outputs
        self._end_returned = False

    @property
    def has_delta(self) -> bool:
        """True if tokens or the end were not returned in a DELTA output yet."""
        if self.finish_reason is not None:
            return not self._end_returned
        return self._num_returned < self._num_known

    @property
    def _num_known(self) -> int:
        """The tokens of the request that may be returned."""
        held = self.rewinder is not None and self.finish_reason is None
        return self.num_read if held else len(self.request.token_ids)

    def push(self, sampled: Sampled) -> str | None:
        """Add the next token of the request. Returns the stop string it completed, if any."""
        if sampled.logprob is not None:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sampled.logprob
            if self.logprobs is not None and sampled.top is not None:
                self.logprobs.append(sampled.top.with_texts(self._texts))
        return self._read(self.num_read + 1)

    def _read(self, end: int) -> str | None:
        """Detokenize the tokens up to ``end``. Returns the stop string they completed, if any."""
        if self._detokenizer is None or self._stopped:
            return None
        request, first = self.request, self.num_read
        self.num_read = end
        known = request.token_ids
        if request.status is _STOP and not (
            request.is_complete or request.params.include_stop_str_in_output
        ):
            end = min(end, len(known) - 1)  # EOS and stop tokens do not appear in the text
        new = known[first:end]
        detokenizer = self._detokenizer
        text = detokenizer.push(new[0]) if len(new) == 1 else detokenizer.extend(new)
        return self._add_text(text)

    def _add_text(self, text: str) -> str | None:
        if self._stops is None:
            self._text += text
            return None
        request = self.request
        can_stop = self.num_read - request.num_prompt_tokens >= request.params.min_tokens
        update = self._stops.push(text, can_stop)
        self._text += update.text
        self._stopped = update.stop is not None
        return update.stop

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End the answer. Adds text that was held back, unless a stop string ended the text."""
        if self.rewinder is not None:
            for sampled in self.rewinder.take_all():
                self.push(sampled)
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._read(len(self.request.token_ids))
        if self._detokenizer is not None and not self._stopped:
            self._add_text(self._detokenizer.finish())
            if self._stops is not None and not self._stopped:
                self._text += self._stops.finish()

    def metrics(self) -> RequestMetrics:
        """Of this answer alone."""
        request = self.request
        return RequestMetrics(
            request.arrival_time,
            request.queued_ts,
            request.scheduled_ts,
            request.first_token_ts,
            request.last_token_ts,
            len(request.token_ids) - request.num_prompt_tokens,
            request.num_preemptions,
            request.events,
            request.num_draft_tokens,
            request.num_accepted_tokens,
            self.finished_ts,
            request.mask_seconds,
        )

    def output(self, delta: bool, index: int | None = None) -> CompletionOutput:
        """The answer so far, or with ``delta`` what is new. Its lists are copies."""
        request, text, logprobs = self.request, self._text, self.logprobs
        first, end = request.num_prompt_tokens, self._num_known
        if delta:
            first, self._num_returned, self._text = self._num_returned, end, ""
            self._end_returned = self.finish_reason is not None
        if logprobs is not None and delta:  # the output takes the old list
            self.logprobs = []
        elif logprobs is not None:
            logprobs = list(logprobs)
        return CompletionOutput(
            self.index if index is None else index,
            text,
            request.token_ids[first:end],
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            closed=request.closed and self.finish_reason == "stop",
        )


class JobAnswers:
    """The answers of one job, and the kind of its outputs."""

    def __init__(self, job: Job) -> None:
        self.request_id = job.request_id
        self.lora_request = None if job.adapter is None else job.adapter.lora_request
        self.prompt_text = job.prompt
        shown = job.spec.prompt_embeds is None
        self.prompt_token_ids = list(job.prompt_token_ids) if shown else []
        self.params = params = job.params
        self.each: list[Answer] = []
        self.results = ResultReservation(job.result_bytes) if job.result_bytes else None
        kind = params.output_kind
        self._selects = params.num_answers > params.n
        if self._selects:  # the best answers are known only at the end
            kind = RequestOutputKind.FINAL_ONLY
        self._at_end = kind is RequestOutputKind.FINAL_ONLY
        self._delta = kind is RequestOutputKind.DELTA
        self._events: Events = ()  # of several answers, merged
        self._merged: list[Events] = []  # what they were merged from
        self.prompt_logprobs: list[Logprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        """True when every answer is finished."""
        return all(map(_REASON, self.each))

    def _pooled(self, found: Pooled) -> EmbeddingOutput | PoolingRequestOutput:
        prompt, metrics = list(self.prompt_token_ids), self.metrics()
        request = self.each[0].request
        if request.spec.pooling is None:
            assert isinstance(found, list)
            return EmbeddingOutput(self.request_id, prompt, found, metrics=metrics)
        return PoolingRequestOutput(
            self.request_id, PoolingOutput(found), prompt, request.num_cached, metrics=metrics
        )

    def output(self) -> RequestOutput | EmbeddingOutput | PoolingRequestOutput | None:
        """The next output, or None if ``output_kind`` requires none now."""
        finished = self.finished
        if self._at_end and not finished:
            return None
        delta, each = self._delta, self.each
        found = each[0].embedding
        if found is not None:
            return self._pooled(found)
        if self._selects:
            params = self.params
            best = sorted(self.each, key=_best_first)[: params.n]
            outputs = [answer.output(False, index) for index, answer in enumerate(best)]
            if params.logprobs is None:  # computed only to find the best
                outputs = [output._replace(logprobs=None) for output in outputs]
        else:
            outputs = [one.output(delta) for one in each if not delta or one.has_delta]
        rows = self.prompt_logprobs
        return RequestOutput(
            self.request_id,
            self.prompt_text,
            self.prompt_token_ids,
            None if rows is None else list(rows),
            outputs,
            finished,
            self.metrics(),
            self.lora_request,
            each[0].request.num_cached,
        )

    def metrics(self) -> RequestMetrics:
        """Metrics over all answers: the earliest of first times, the latest of last times."""
        metrics = self.each[0].metrics()
        if len(self.each) == 1:
            return metrics
        requests = [answer.request for answer in self.each]
        return metrics._replace(
            scheduled_ts=min(
                (r.scheduled_ts for r in requests if r.scheduled_ts is not None), default=None
            ),
            first_token_ts=min(
                (r.first_token_ts for r in requests if r.first_token_ts is not None), default=None
            ),
            last_token_ts=max(
                (r.last_token_ts for r in requests if r.last_token_ts is not None), default=None
            ),
            num_generation_tokens=sum(r.num_output_tokens for r in requests),
            num_preemptions=sum(r.num_preemptions for r in requests),
            events=self._all_events([r.events for r in requests]),
            num_draft_tokens=sum(r.num_draft_tokens for r in requests),
            num_accepted_tokens=sum(r.num_accepted_tokens for r in requests),
            finished_ts=self._finished_ts(),
            mask_seconds=sum(r.mask_seconds for r in requests),
        )

    def _finished_ts(self) -> float | None:
        """When the last answer ended; ``None`` while one has not."""
        ends = [one.finished_ts for one in self.each if one.finished_ts is not None]
        return max(ends) if len(ends) == len(self.each) else None

    def _all_events(self, answers: list[Events]) -> Events:
        """The events of all answers. Merged again only if there are new ones: most steps have
        none."""
        if answers != self._merged:
            self._merged, self._events = answers, merged_events(answers)
        return self._events


def _best_first(answer: Answer) -> tuple[bool, float]:
    """Sort key: highest cumulative log-probability first, answers with an error last."""
    return answer.finish_reason == "error", -(answer.cumulative_logprob or 0.0)
