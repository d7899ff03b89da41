"""The loop: plan a step, run it, commit it, turn the tokens into outputs.

``Engine`` owns a :class:`~sdk.engine.scheduling.scheduler.Scheduler` and an executor. It is not
thread-safe: the caller (``LLM``) serializes the calls, except that ``add_request`` and ``abort``
may come while ``step`` waits for the executor.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Sequence

from sdk.engine.completion import Completion, Generation, is_watched
from sdk.engine.plan import RequestKind
from sdk.engine.scheduling.queues import RequestUpdate
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.results import ResultReservation
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.errors import EngineClosedError, EngineDeadError, RequestError
from sdk.executors.base import Executor
from sdk.outputs import EmbeddingOutput, FinishReason, RequestOutput
from sdk.params import SamplingParams
from sdk.quant.tokenizer import Tokenizer
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.uniform import child_seed
from sdk.text.stops import StopStrings, stop_strings
from sdk.text.token_texts import TokenTexts

_NOTHING_RESOLVED = ResolvedParams()
#: What breaks off in the bookkeeping leaves queues, pages and answers that do not fit together.
_BROKEN_OFF = "a step was broken off"
logger = logging.getLogger("sdk")
Output = RequestOutput | EmbeddingOutput


class Engine:
    """Requests in, outputs out, one step at a time. The executor has been started.

    ``tokenizer=None`` works on token ids alone: outputs carry no text, stop strings are refused.
    ``vocab_size`` bounds the token ids of prompts. ``seed`` starts the generator that gives a seed
    to requests without one.

    A failure of the executor ends the engine: every request in it gets an output with
    ``finish_reason="error"``, ``dead`` holds the :class:`EngineDeadError`, and from then on
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
        self._generations: dict[str, Generation] = {}  # unfinished, by the caller's id
        self._owners: dict[str, tuple[Generation, Completion]] = {}  # by the scheduler's id
        self._news: dict[Generation, None] = {}  # those owed an output, in order
        #: For log-probabilities.
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._num_finished = 0
        self._seconds = [0.0] * 4  # plan, execute, commit, outputs
        self._closed = False

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        prompt_text: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        kind: RequestKind = "generate",
        arrival_time: float | None = None,
        resolved: ResolvedParams = _NOTHING_RESOLVED,
        negative_prompt_token_ids: Sequence[int] | None = None,
        stops: StopStrings | None = None,
        result_bytes: int = 0,
    ) -> None:
        """Queue a request. Raises RequestError, EngineDeadError or EngineClosedError; then nothing
        was queued. ``arrival_time`` is a moment of the scheduler's clock (default now) and decides
        who is first; ``priority`` overrides ``params``. ``negative_prompt_token_ids`` are what a
        ``guidance_scale`` leads away from (default: the last prompt token). ``stops`` are
        those of ``params``, if somebody compiled them; ``result_bytes`` are what its
        log-probabilities may take: it starts when there is room for them.
        """
        self._check_alive()
        if self._tokenizer is None and (params.stop or params.stop_regex):
            raise RequestError("stop and stop_regex need a tokenizer; this engine has none")
        _check_guidance(params, kind, negative_prompt_token_ids)
        self._check_token_ids(prompt_token_ids)
        self._check_token_ids(negative_prompt_token_ids or ())
        children = self._fan_out(request_id, params, kind)
        arrival = self.scheduler.queues.clock() if arrival_time is None else arrival_time
        generation = Generation(request_id, prompt_text, prompt_token_ids, params, arrival)
        generation.results = ResultReservation(result_bytes) if result_bytes else None
        requests = [
            Request(
                child_id,
                prompt_token_ids,
                child_params,
                kind=kind,
                priority=priority,
                arrival_time=arrival,
                salt=cache_salt,
                resolved=resolved,
                negative_prompt_token_ids=negative_prompt_token_ids,
                watched=is_watched(child_params),
            )
            for child_id, child_params in children
        ]
        stops = stops or stop_strings(params)
        # The text side first: it may raise, and then the scheduler must know nothing.
        generation.completions = [
            Completion(index, request, self._tokenizer, stops, self._texts)
            for index, request in enumerate(requests)
        ]
        for request in requests:  # alike in all that is checked: the first is refused, or none
            request.results = generation.results
            self.scheduler.queues.add(request)
        for request, completion in zip(requests, generation.completions, strict=True):
            self._owners[request.request_id] = (generation, completion)
        self._generations[request_id] = generation

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        limit = self._vocab_size
        if token_ids and limit is not None and not 0 <= min(token_ids) <= max(token_ids) < limit:
            wrong = next(token for token in token_ids if not 0 <= token < limit)
            raise RequestError(f"prompt token id {wrong} is outside the vocabulary [0, {limit})")

    def _fan_out(
        self, request_id: str, params: SamplingParams, kind: RequestKind
    ) -> list[tuple[str, SamplingParams]]:
        """The scheduler's requests of one request: answer ``i`` has a seed made from its and ``i``.

        They are equal otherwise, except that only the first scores the prompt, and that choosing
        the best of several needs their log-probabilities.
        """
        if request_id in self._generations:
            raise RequestError(f"request id {request_id!r} is already in use")
        params = params.with_seed(self._random.getrandbits(63))
        if kind == "embed" or params.num_answers == 1:
            return [(request_id, params)]
        logprobs = params.logprobs
        if logprobs is None and params.num_answers > params.n:
            logprobs = 0
        child = params.clone(n=1, best_of=None, logprobs=logprobs)
        seed, scores = params.seed or 0, child.prompt_logprobs
        children = [
            (
                f"{request_id}#{index}",
                child.clone(
                    seed=child_seed(seed, index), prompt_logprobs=None if index else scores
                ),
            )
            for index in range(params.num_answers)
        ]
        for child_id, _ in children:
            if child_id in self._owners:
                raise RequestError(f"request id {request_id!r} is already in use (as {child_id!r})")
        return children

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        """End requests now; their pages are free at once. Unknown and finished ids are ignored.

        Returns their last outputs (``finish_reason="abort"``, with what was generated so far).
        """
        last = []
        for request_id in request_ids:
            generation = self._generations.get(request_id)
            if generation is not None:
                for completion in generation.completions:
                    if completion.finish_reason is None:
                        self.scheduler.queues.abort(completion.request.request_id)
                        self._finish(generation, completion, "abort")
                self._news.pop(generation, None)
                last.append(generation.output())
        return [output for output in last if output is not None]

    @property
    def has_unfinished(self) -> bool:
        """True while ``step`` has something to do or to return."""
        return bool(self._generations or self._news)

    # The loop

    def step(self, most_tokens: int | None = None) -> list[Output]:
        """Run one step; returns an output per request that has news (and wants to hear it).

        ``most_tokens``: prompts are to make the step no larger than this.

        An interrupt (KeyboardInterrupt) while the executor works, where nearly all time goes, is
        raised on after everything was put back: the requests go on with the next step. In the
        middle of the bookkeeping it cannot be undone and ends the engine.
        """
        if self._closed or self.dead is not None:
            self._check_alive()
        if not (self._generations or self._news):
            return []
        scheduler, clock = self.scheduler, time.perf_counter
        while scheduler.num_in_flight < scheduler.batches_in_flight:
            begin = clock()
            try:
                plan = scheduler.plan(most_tokens)
                planned = clock()
            except BaseException as error:
                self._die(_BROKEN_OFF, error)
                raise
            self._seconds[0] += planned - begin
            if plan is None:
                break
            try:
                self._executor.launch(plan)
            except Exception as error:
                self._die("the executor failed", error)
                return self._outputs()
            except BaseException:
                scheduler.rollback()
                raise
            self._seconds[1] += clock() - planned
        self._land()
        if not self._news:
            return []
        begin = clock()
        try:
            outputs = self._outputs()
        except BaseException as error:
            self._die(_BROKEN_OFF, error)
            raise
        self._seconds[3] += clock() - begin
        return outputs

    def settle(self) -> None:
        """Wait for the steps in flight; the next call of ``step`` returns what became of them."""
        while self.scheduler.num_in_flight and self.dead is None:
            self._land()

    def _land(self) -> None:
        """Wait for the oldest step in flight, and hand out what it produced."""
        clock, seconds = time.perf_counter, self._seconds
        begin = clock()
        try:
            result = self._executor.result()
            executed = clock()
        except Exception as error:
            self._die("the executor failed", error)
            return
        except BaseException:
            self.scheduler.rollback()
            raise
        try:
            updates = self.scheduler.commit(result)
            committed = clock()
            for update in updates:
                self._apply(update)
            seconds[1] += executed - begin
            seconds[2] += committed - executed
            seconds[3] += clock() - committed
        except BaseException as error:
            self._die(_BROKEN_OFF, error)
            raise

    def _apply(self, update: RequestUpdate) -> None:
        """Hand one request's news to its answer. What goes wrong here ends that request only."""
        owner = self._owners.get(update.request.request_id)
        if owner is None or owner[1].request is not update.request:
            return
        generation, completion = owner
        request = update.request
        stop: str | None = None
        try:
            if update.prompt_logprobs and generation.prompt_logprobs is not None:
                generation.prompt_logprobs += [
                    scored.top.with_texts(self._texts)
                    for scored in update.prompt_logprobs
                    if scored.top is not None
                ]
            if update.sampled:
                for sampled in update.sampled:
                    if (stop := completion.push(sampled)) is not None:
                        break
                self._news[generation] = None
            elif update.hidden is not None:
                completion.embedding = update.hidden
        except Exception as error:
            logger.warning("request %s failed", request.request_id, exc_info=True)
            self.scheduler.queues.finish(request.request_id, "error")
            self._finish(generation, completion, "error", f"{type(error).__name__}: {error}")
            return
        if stop is not None:
            # The scheduler may have ended it with this very token: what the text says comes first.
            self.scheduler.queues.finish(request.request_id, "stop", stop)
            self.scheduler.committer.shorten(request, completion.num_read)
            self._finish(generation, completion, "stop", stop)
        elif request.finish_reason is not None:
            self._finish(generation, completion, request.finish_reason, request.stop_reason)

    def _finish(
        self,
        generation: Generation,
        completion: Completion,
        reason: FinishReason,
        stop_reason: int | str | None = None,
    ) -> None:
        try:
            completion.finish(reason, stop_reason)
        except Exception as error:
            logger.warning("request %s failed", completion.request.request_id, exc_info=True)
            completion.finish_reason = "error"
            completion.stop_reason = f"{type(error).__name__}: {error}"
        del self._owners[completion.request.request_id]
        self._news[generation] = None
        if generation.finished:
            # The id is free for another request from now on; its last output is in _news.
            del self._generations[generation.request_id]
            if generation.results is not None:
                self.scheduler.admission.release_results(generation.results)
            self._num_finished += 1

    def _outputs(self) -> list[Output]:
        news, self._news = self._news, {}
        outputs = [generation.output() for generation in news]
        return [output for output in outputs if output is not None]

    def _die(self, what: str, error: BaseException) -> None:
        """The ranks or the books are lost: every request ends in error, now."""
        logger.error("%s; the engine is dead", what, exc_info=error)
        self.dead = EngineDeadError(f"{what}: {type(error).__name__}: {error}")
        self.dead.__cause__ = error
        for generation, completion in list(self._owners.values()):
            self.scheduler.queues.finish(completion.request.request_id, "error", str(self.dead))
            self._finish(generation, completion, "error", str(self.dead))

    # The engine itself

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine was closed")
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; always possible, so always True (vLLM's may refuse)."""
        self.scheduler.reset_prefix_cache()
        return True

    def get_metrics(self) -> dict[str, float]:
        """Counters since the engine was built; times are seconds.

        ``prefix_queries`` and ``prefix_hits`` count whole pages looked up and found in the cache
        when requests were admitted, ``cache_hit_rate`` is their quotient. ``swapped_out`` and
        ``swapped_in`` count pages copied to the swap space and back, ``swap_failed`` those that its
        file did not take, ``restored`` pages written from snapshots. ``num_prompt_tokens`` are the
        prompt tokens that were computed: not those a prefix hit gave, and again those lost to a
        preemption. ``native_seconds`` is the part of ``execute_seconds`` spent in native calls:
        what is left of the time a caller waited is Python.
        """
        scheduler = self.scheduler
        pool, swap = scheduler.pool, scheduler.prefixes.swap
        return {
            "num_running": scheduler.queues.num_running,
            "num_waiting": scheduler.queues.num_waiting,
            "num_finished": self._num_finished,
            "num_steps": scheduler.num_steps,
            "num_prompt_tokens": scheduler.committer.num_prompt_tokens,
            "num_generation_tokens": scheduler.committer.num_generation_tokens,
            "num_preemptions": scheduler.queues.num_preemptions,
            "prefix_queries": pool.queries,
            "prefix_hits": pool.hits,
            "cache_hit_rate": pool.hits / pool.queries if pool.queries else 0.0,
            "swapped_out": swap.stored,
            "swapped_in": swap.loaded,
            "swap_failed": swap.failed,
            "swap_pages": swap.num_slots,
            "swap_pages_used": swap.num_used,
            "restored": scheduler.prefixes.restored,
            "num_pages": pool.capacity,
            "num_pages_used": pool.capacity - pool.num_available,
            "num_pages_cached": pool.num_cached,
            "num_pages_pinned": scheduler.prefixes.num_pinned,
            **({} if scheduler.ladder is None else scheduler.ladder.metrics(swap.counts())),
            "plan_seconds": self._seconds[0],
            "execute_seconds": self._seconds[1],
            "commit_seconds": self._seconds[2],
            "output_seconds": self._seconds[3],
            "native_seconds": self._executor.native_seconds,
        }

    def break_off(self) -> None:
        """Have a step that waits for other processes fail; it runs in another thread."""
        self._executor.break_off()

    def close(self) -> None:
        """Abort everything and close the executor; idempotent. Afterwards requests and steps raise
        EngineClosedError.
        """
        if not self._closed:
            self._closed = True
            try:
                self.abort(list(self._generations))
            except Exception:  # the books of a step that broke off may contradict each other
                logger.warning("requests could not be ended one by one", exc_info=True)
            finally:
                self._generations.clear()
                self._owners.clear()
                self._news.clear()
                self._tokenizer = self._texts = None
                self._executor.close()


def _check_guidance(
    params: SamplingParams, kind: RequestKind, negative_prompt: Sequence[int] | None
) -> None:
    if params.guidance_scale != 1.0 and kind == "embed":
        raise RequestError("guidance_scale guides answers; an embedding has none")
    if params.guidance_scale == 1.0 and negative_prompt is not None:
        raise RequestError("a negative prompt has no effect without a guidance_scale (not 1)")
