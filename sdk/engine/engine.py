"""The engine loop: plan a step, run it, commit it, turn its tokens into outputs.

``Engine`` owns a :class:`~sdk.engine.scheduling.scheduler.Scheduler` and an executor. It is not
thread-safe: the caller (``LLM``) serializes the calls. Only ``add`` and ``abort`` may be called
while ``step`` waits for the executor.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from sdk.api.errors import EngineClosedError, EngineDeadError, RequestError
from sdk.api.logprobs import Sampled
from sdk.api.outputs import EmbeddingOutput, FinishReason, PoolingRequestOutput, RequestOutput
from sdk.engine.answers import Answer, JobAnswers
from sdk.engine.executor import Executor
from sdk.engine.job import Job
from sdk.engine.numbers import numbers, trace_step, traced
from sdk.engine.plan import SequenceSpec
from sdk.engine.rewinds import Rewinder
from sdk.engine.running_requests import RequestInfo, request_info
from sdk.engine.scheduling.queues import RequestUpdate
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.stage_times import StageTimes
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.quant.tokenizer import Tokenizer
from sdk.sampling.uniform import child_seed
from sdk.text.banned import banned_strings
from sdk.text.stops import stop_strings
from sdk.text.token_texts import TokenTexts

if TYPE_CHECKING:
    from sdk.engine.adapter_loader import AdapterLoader

#: For failures in the scheduler or while outputs are made. They leave queues, pages and answers
#: inconsistent, so the engine cannot continue.
_STEP_FAILED = "a step failed"
#: How long a step waits for an adapter if there is nothing else to run: new requests wait as long.
_ADAPTER_SECONDS = 0.01
logger = logging.getLogger("sdk")
T = TypeVar("T")
Output = RequestOutput | EmbeddingOutput | PoolingRequestOutput


class Engine:
    """Takes requests and returns outputs, one step at a time. The executor must be started.

    With ``tokenizer=None`` the engine uses token ids only: outputs have no text, and stop strings
    are rejected. ``vocab_size`` bounds the token ids of prompts. ``seed`` initializes the generator
    of seeds for requests without one.

    A failure of the executor ends the engine: every unfinished request gets an output with
    ``finish_reason="error"``, ``dead`` is set to an :class:`EngineDeadError`, and all later
    requests and steps raise it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        *,
        vocab_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self.scheduler = scheduler
        self.dead: EngineDeadError | None = None
        self._executor = executor
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._unfinished: dict[str, JobAnswers] = {}  # by the caller's id
        self._by_id: dict[str, tuple[JobAnswers, Answer]] = {}  # by the scheduler's id
        self._updated: dict[JobAnswers, None] = {}  # need an output; an ordered set
        #: For log-probabilities.
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._num_finished = 0
        self._seconds = [0.0] * 4  # plan, execute, commit, outputs
        self._clock = scheduler.queues.clock
        #: Records steps and requests while it is set.
        self.trace: Trace | None = None
        #: The number of steps planned, while the ranks work: until then nothing changes here.
        self.standstill: int | None = None
        self._closed = False
        #: Loads the adapters of requests. ``None``: they cannot have any.
        self.adapters: AdapterLoader | None = None
        #: Prepares one more size of steps while there are no requests; whether any was left.
        #: ``None``: nothing has to be prepared.
        self.prepare: Callable[[], bool] | None = None
        #: Why requests cannot have images, if they cannot.
        self.no_images: str | None = "it has no encoder of images"
        #: How long the stages compute, if there are several.
        self.stage_times: StageTimes | None = None
        #: What experts that are not all in memory have cost: see docs/metrics.md.
        self.expert_numbers: Callable[[], dict[str, float]] = dict

    # Requests

    def add(self, job: Job) -> None:
        """Queue a request. :raises RequestError, EngineDeadError, EngineClosedError: it cannot be.

        ``job.arrival_time``: a time of the scheduler's clock.
        """
        self._check_alive()
        params, negative = job.params, job.negative_prompt_token_ids
        strings = params.stop or params.stop_regex or params.banned_strings
        if self._tokenizer is None and strings:
            raise RequestError(
                "stop, stop_regex and banned_strings need a tokenizer; this engine has none"
            )
        _check_guidance(job)
        token_ids = [*job.prompt_token_ids, *(negative or ())]
        if job.spec.images:
            placeholder = self._check_images(job)
            token_ids = [token for token in token_ids if token != placeholder]
        self._check_token_ids(token_ids)
        specs = self._fan_out(job.spec)
        if job.arrival_time is None:
            job = replace(job, arrival_time=self.scheduler.queues.clock())
        answers = JobAnswers(job)
        stops, banned = job.stops, job.banned
        if strings:
            stops, banned = stops or stop_strings(params), banned or banned_strings(params)
        # Answers first: they may raise, and then the scheduler must not have the requests.
        answers.each = [
            Answer(index, Request(job, spec), self._tokenizer, stops, self._texts, banned)
            for index, spec in enumerate(specs)
        ]
        for answer in answers.each:
            request = answer.request
            request.results = answers.results
            if request.spec.images and self.scheduler.images is not None:
                self.scheduler.images.mark(request)
            self.scheduler.queues.add(request)  # checks what they share: only the first can raise
            self.scheduler.recorder.added(request)
            self._by_id[request.request_id] = (answers, answer)
        self._unfinished[answers.request_id] = answers

    def _check_images(self, job: Job) -> int:
        """The token of images, which may be none of the vocabulary."""
        if self.scheduler.images is None:
            raise RequestError(f"images: this engine reads none: {self.no_images}")
        self.scheduler.images.check(job)
        return self.scheduler.images.limits.vision.token_id

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        limit = self._vocab_size
        if token_ids and limit is not None and not 0 <= min(token_ids) <= max(token_ids) < limit:
            wrong = next(token for token in token_ids if not 0 <= token < limit)
            raise RequestError(f"prompt token id {wrong} is outside the vocabulary [0, {limit})")

    def _fan_out(self, spec: SequenceSpec) -> list[SequenceSpec]:
        """What the scheduler runs for each answer.

        The seed of answer ``i`` is derived from the request's seed and ``i``. Only the first answer
        scores the prompt. ``best_of`` adds log-probabilities, to find the best answers.
        """
        request_id = spec.request_id
        if request_id in self._unfinished:
            raise RequestError(f"request id {request_id!r} is already in use")
        params = spec.params.with_seed(self._random.getrandbits(63))
        if spec.kind == "embed" or params.num_answers == 1:
            return [spec if params is spec.params else replace(spec, params=params)]
        logprobs = params.logprobs
        if logprobs is None and params.num_answers > params.n:
            logprobs = 0
        child = params.clone(n=1, best_of=None, logprobs=logprobs)
        seed, scores = params.seed or 0, child.prompt_logprobs
        specs = []
        for index in range(params.num_answers):
            name = f"{request_id}#{index}"
            if name in self._by_id:
                raise RequestError(f"request id {request_id!r} is already in use (as {name!r})")
            drawn = {"seed": child_seed(seed, index), "prompt_logprobs": None if index else scores}
            specs.append(replace(spec, request_id=name, params=child.clone(**drawn)))
        return specs

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        """End requests now and free their pages. Unknown and finished ids are ignored.

        Returns their last outputs (``finish_reason="abort"``, with the tokens generated so far).
        """
        last = []
        for request_id in request_ids:
            answers = self._unfinished.get(request_id)
            if answers is not None:
                for answer in answers.each:
                    if answer.finish_reason is None:
                        self.scheduler.queues.abort(answer.request.request_id)
                        self._finish(answers, answer, "abort")
                self._updated.pop(answers, None)
                last.append(answers.output())
        return [output for output in last if output is not None]

    @property
    def has_unfinished(self) -> bool:
        """True while ``step`` has requests to run or outputs to return."""
        return bool(self._unfinished or self._updated)

    # The loop

    def step(self, most_tokens: int | None = None) -> list[Output]:
        """Run one step; returns the outputs of requests that changed.

        ``most_tokens``: prompts must not make the step larger than this.

        A KeyboardInterrupt while the executor works (nearly all of the time) is raised after the
        step was rolled back; the requests continue with the next step. An interrupt in the
        scheduler or while outputs are made cannot be rolled back and ends the engine.
        """
        if self._closed or self.dead is not None:
            self._check_alive()
        if not (self._unfinished or self._updated):
            if self.adapters is not None and self.adapters.busy:
                self.advance_adapters()
            return []
        scheduler, clock = self.scheduler, self._clock
        plan, begin = None, clock()
        planned = started = begin
        while scheduler.num_in_flight < scheduler.batches_in_flight:
            try:
                plan = scheduler.plan(most_tokens)
                planned = clock()
            except BaseException as error:
                self._fail_engine(_STEP_FAILED, error)
                raise
            self._seconds[0] += planned - begin
            if plan is None:
                break
            try:
                self._on_ranks(self._executor.launch, plan)
            except Exception as error:
                self._fail_engine("the executor failed", error)
                return self._outputs()
            except BaseException:
                scheduler.rollback()
                raise
            begin = clock()
            self._seconds[1] += begin - planned
        self._finish_step(started)
        if self.adapters is not None and self.adapters.busy:
            self.advance_adapters()
        outputs = self._timed_outputs() if self._updated else []
        if (trace := self.trace) is not None:
            trace_step(trace, self.scheduler, plan, started, planned)
        return outputs

    def _timed_outputs(self) -> list[Output]:
        begin = self._clock()
        try:
            outputs = self._outputs()
        except BaseException as error:
            self._fail_engine(_STEP_FAILED, error)
            raise
        self._seconds[3] += self._clock() - begin
        return outputs

    def _on_ranks(self, call: Callable[..., T], *args: Any) -> T:
        """Launch a step, or wait for one."""
        self.standstill = self.scheduler.num_steps
        try:
            return call(*args)
        finally:
            self.standstill = None

    def work_while_idle(self) -> bool:
        """Do what serving would wait for, some 0.2 s of it; whether anything was left to do."""
        if self.prepare is None or self.has_unfinished or self._closed or self.dead is not None:
            return False
        self.settle()
        try:
            return self.prepare()
        except Exception as error:
            self._fail_engine("the executor failed", error)
            return False

    def settle(self) -> None:
        """Wait for all steps in flight. The next call of ``step`` returns their outputs."""
        while self.scheduler.num_in_flight and self.dead is None:
            self._finish_step(self._clock())

    def advance_adapters(self) -> None:
        """Between two steps: load the adapters that waiting requests need, as far as they are read.

        An adapter that cannot be loaded ends its requests. If nothing else can run, this waits for
        up to 10 ms.
        """
        loader, queues = self.adapters, self.scheduler.queues
        assert loader is not None
        if not queues.running and all(request.adapter for request in queues.waiting):
            loader.wait(_ADAPTER_SECONDS)
        self.settle()
        if self.dead is not None:
            return
        try:
            failed = loader.advance()
        except Exception as error:
            self._fail_engine("the executor failed", error)
            return
        except BaseException as error:
            self._fail_engine(_STEP_FAILED, error)
            raise
        slots = self.scheduler.adapters
        assert slots is not None
        for adapter, reason in failed:
            key = adapter.source.key
            for answers, answer in list(self._by_id.values()):
                if answer.request.adapter == key:
                    queues.finish(answer.request.request_id, "error")
                    self._finish(answers, answer, "error", str(reason))
            adapter.error = reason
            slots.failed(adapter)

    def _finish_step(self, started: float) -> None:
        """Wait for the oldest step in flight, commit it and update the answers.

        ``started``: when the work on this step, or on the next one in flight, began.
        """
        clock, seconds = self._clock, self._seconds
        begin = clock()
        try:
            result = self._on_ranks(self._executor.result)
            executed = clock()
        except Exception as error:
            self._fail_engine("the executor failed", error)
            return
        except BaseException:
            self.scheduler.rollback()
            raise
        try:
            scheduler = self.scheduler
            recorder, committer = scheduler.recorder, scheduler.committer
            if executed >= recorder.rates.ends:
                recorder.roll(
                    executed, committer.num_prompt_tokens, committer.num_generation_tokens
                )
            updates = scheduler.commit(result)
            committed = clock()
            recorder.step(
                committed - started,
                scheduler.num_tokens,
                committer.interval,
                committer.num_together,
            )
            if (trace := self.trace) is not None:  # another thread may end it at any time
                trace.executed, trace.committed = executed, committed
            for update in updates:
                self._apply(update)
            seconds[1] += executed - begin
            seconds[2] += committed - executed
            seconds[3] += clock() - committed
        except BaseException as error:
            self._fail_engine(_STEP_FAILED, error)
            raise

    def _apply(self, update: RequestUpdate) -> None:
        """Apply a request's update to its answer. An exception here ends only that request."""
        owner = self._by_id.get(update.request.request_id)
        if owner is None or owner[1].request is not update.request:
            return
        answers, answer = owner
        request, sampled = update.request, update.sampled
        stop: str | None = None
        problem: str | None = None
        try:
            if answer.rewinder is not None and sampled:
                sampled, problem = self._take_certain(request, answer.rewinder, sampled)
            if update.prompt_logprobs and answers.prompt_logprobs is not None:
                answers.prompt_logprobs += [
                    scored.top.with_texts(self._texts)
                    for scored in update.prompt_logprobs
                    if scored.top is not None
                ]
            if sampled:
                for one in sampled:
                    if (stop := answer.push(one)) is not None:
                        break
                self._updated[answers] = None
            elif update.hidden is not None:
                answer.embedding = update.hidden
        except Exception as error:
            logger.warning("request %s failed", request.request_id, exc_info=True)
            self.scheduler.queues.finish(request.request_id, "error")
            self._finish(answers, answer, "error", f"{type(error).__name__}: {error}")
            return
        if problem is not None:
            self.scheduler.queues.finish(request.request_id, "error")
            self._finish(answers, answer, "error", problem)
        elif stop is not None:
            # The scheduler may have finished it at the same token; the stop string has precedence.
            self.scheduler.queues.finish(request.request_id, "stop", stop)
            self.scheduler.committer.shorten(request, answer.num_read)
            self._finish(answers, answer, "stop", stop)
        elif request.finish_reason is not None:
            self._finish(answers, answer, request.finish_reason, request.stop_reason)

    def _take_certain(
        self, request: Request, rewinder: Rewinder, sampled: Sequence[Sampled]
    ) -> tuple[Sequence[Sampled], str | None]:
        """The tokens that no banned string can take back any more, after a rewind if there must be
        one; and why the answer cannot go on, if it cannot.
        """
        certain, rewind = rewinder.read(sampled)
        if rewind is not None:
            request.mirostat_mu = rewind.mirostat_mu
            num_tokens = request.num_prompt_tokens + rewind.num_tokens
            self.scheduler.rewind(request, num_tokens, rewind.forbidden)
        return certain, None if rewind is None else rewind.problem

    def _finish(
        self,
        answers: JobAnswers,
        answer: Answer,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> None:
        try:
            answer.finish(reason, stop_reason)
        except Exception as error:
            logger.warning("request %s failed", answer.request.request_id, exc_info=True)
            answer.finish_reason = "error"
            answer.stop_reason = f"{type(error).__name__}: {error}"
        answer.finished_ts = now = self._clock()
        ended = answer.finish_reason or reason  # an error if the text cannot be made
        self.scheduler.recorder.finished(answer.request, ended, now)
        if (trace := self.trace) is not None:
            trace.request(*traced(answers, answer))
        del self._by_id[answer.request.request_id]
        self._updated[answers] = None
        if answers.finished:
            # Another request may use the id now. The last output is still due (_updated).
            del self._unfinished[answers.request_id]
            if answers.results is not None:
                self.scheduler.admission.release_results(answers.results)
            self._num_finished += 1
            if answer.request.spec.kind == "generate":
                tokens = max(one.request.num_output_tokens for one in answers.each)
                self.scheduler.recorder.longest_answer.add(tokens)

    def trace_unfinished(self, trace: Trace) -> None:
        """Add the requests that are not finished to a trace that ends."""
        for answers, answer in list(self._by_id.values()):
            trace.request(*traced(answers, answer))

    def list_requests(self) -> list[RequestInfo]:
        """The unfinished answers, in the order in which they were added."""
        now = self._clock()
        return [
            request_info(one.request_id, answer.index, answer.request, self.scheduler, now)
            for one in list(self._unfinished.values())
            for answer in one.each
            if answer.finish_reason is None
        ]

    def _outputs(self) -> list[Output]:
        updated, self._updated = self._updated, {}
        outputs = [answers.output() for answers in updated]
        return [output for output in outputs if output is not None]

    def _fail_engine(self, what: str, error: BaseException) -> None:
        """The ranks or the engine's state are lost: end every request with an error."""
        logger.error("%s; the engine is dead", what, exc_info=error)
        self.dead = EngineDeadError(f"{what}: {type(error).__name__}: {error}")
        self.dead.__cause__ = error
        for answers, answer in list(self._by_id.values()):
            self.scheduler.queues.finish(answer.request.request_id, "error", str(self.dead))
            self._finish(answers, answer, "error", str(self.dead))

    # The engine itself

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Run the next steps on ``wrap(executor)``. Called between two steps, by tests."""
        self._executor = wrap(self._executor)

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed")
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Always returns True (in vLLM this call may fail)."""
        self.scheduler.reset_prefix_cache()
        return True

    def get_metrics(self) -> dict[str, float]:
        """See :meth:`sdk.LLM.get_metrics`. Any thread may call it."""
        counts = self._num_finished, self._executor.native_seconds
        found = numbers(self.scheduler, self._seconds, *counts, self._clock())
        found |= self.expert_numbers()
        return found if self.stage_times is None else found | self.stage_times.numbers()

    def stats(self) -> EngineStats:
        """See :meth:`sdk.LLM.stats`. Any thread may call it."""
        return self.scheduler.recorder.read(self.get_metrics())

    def break_off(self) -> None:
        """Make a step fail that waits for other processes. The step runs in another thread."""
        self._executor.break_off()

    def close(self) -> None:
        """Abort all requests and close the executor. Idempotent.

        Later requests and steps raise EngineClosedError.
        """
        if not self._closed:
            self._closed = True
            try:
                self.abort(list(self._unfinished))
            except Exception:  # the state after a failed step may be inconsistent
                logger.warning("aborting requests on close failed", exc_info=True)
            finally:
                self._unfinished.clear()
                self._by_id.clear()
                self._updated.clear()
                self._tokenizer = self._texts = None
                if self.adapters is not None:
                    self.adapters.close()
                self._executor.close()


def _check_guidance(job: Job) -> None:
    scale = job.params.guidance_scale
    if scale != 1.0 and job.spec.kind == "embed":
        raise RequestError(
            f"guidance_scale: expected 1 for an embedding, found {scale}; "
            "guidance applies only to generated answers"
        )
    if scale == 1.0 and job.negative_prompt_token_ids is not None:
        raise RequestError("a negative prompt has no effect without a guidance_scale other than 1")
