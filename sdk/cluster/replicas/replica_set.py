"""Runs jobs on several replicas: processes with one engine each.

A request is sent to the replica that the router chooses, and stays known here with its parameters
until its last output has come. If its replica is lost, it runs again on another one, from its
beginning, with the same seed: answers are bitwise the same, and what its caller has already got is
left out (``replay.py``). A lost replica is replaced (``processes.py``).
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sdk.api.config import EngineConfig
from sdk.api.errors import EngineAsleepError, EngineClosedError, EngineDeadError, RequestError
from sdk.api.outputs import Estimate, RequestOutput
from sdk.api.params import SamplingParams
from sdk.api.scheduling_policy import make_policy
from sdk.cluster.replicas.messages import (
    Abort,
    Add,
    Answer,
    Call,
    Load,
    Prefill,
    Prefilled,
    Ready,
    Role,
    Update,
    packed_job,
)
from sdk.cluster.replicas.processes import ReplicaProcesses
from sdk.cluster.replicas.replay import Progress
from sdk.cluster.replicas.routing import Routed, Router
from sdk.engine.engine import Output
from sdk.engine.executor import Executor
from sdk.engine.job import Job
from sdk.requests.driving.driver import check_process
from sdk.requests.driving.job_driver import OutputSink
from sdk.requests.driving.waiting_times import Place, QueueLimit, check_new
from sdk.requests.driving.wakeups import LoopInbox, LoopInboxes
from sdk.requests.prompts.reader import Prompt

logger = logging.getLogger("sdk")

#: A prompt with fewer tokens to compute is not handed over: a step that decodes computes it too.
_LEAST_HANDED_OVER = 64
#: A request that was on this many replicas when they were lost is not tried again: it may be the
#: reason.
_MOST_RUNS = 3
#: How long a call waits for a replica if none runs.
_PATIENCE_S = 30.0
_CLOSED = "this LLM was closed"


@dataclass
class _Request:
    """An unfinished request."""

    job: Job
    data: bytes  # packed for a replica
    routed: Routed
    place: Place
    progress: Progress
    replica: int = -1
    #: The replica that computes its prompt for it, and the number of that attempt.
    prefill: int = -1
    attempt: int = -1
    runs: int = 0
    aborted: bool = False
    prompt_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        shown = self.job.prompt_token_ids if self.job.spec.prompt_embeds is None else ()
        self.prompt_token_ids = list(shown)

    def with_prompt(self, output: Output) -> Output:
        """An output of a replica, which leaves the prompt out."""
        if not isinstance(output, RequestOutput):
            return output
        prompt, ids = self.job.prompt, self.prompt_token_ids
        return output._replace(prompt=prompt, prompt_token_ids=ids)


class _Waiting(NamedTuple):
    """A caller that waits for the answer to a call."""

    done: threading.Event
    answers: list[Answer]


class ReplicaSet:
    """See the module, :class:`sdk.requests.driving.job_driver.JobDriver` and
    :class:`sdk.cluster.replicas.processes.Events`.

    ``config``: that of the whole; ``own``: that of each replica. The constructor returns when all
    replicas run.

    :raises EngineDeadError: a replica does not start; what the model's files raise in a load.
    """

    def __init__(
        self,
        config: EngineConfig,
        own: EngineConfig,
        packing_threads: int,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._router = Router(config.replica_routing)
        self._num_prefill = config.prefill_replicas  # the first ones
        self._prefill_router = Router(config.replica_routing)
        self._addresses: dict[int, str | None] = {}  # where a replica receives hand-overs
        self.num_hand_overs = self.num_failed_hand_overs = 0
        self._random = random.Random(config.seed)
        self._lock = threading.RLock()  # of everything below
        self._changed = threading.Condition(self._lock)
        self._requests: dict[str, _Request] = {}
        self._homeless: list[_Request] = []  # no replica is ready for them
        self._has_news = False  # something was delivered since the last step()
        self._calls: dict[int, tuple[int, _Waiting]] = {}  # with the replica that runs it
        #: Calls that every replica must have had, in order: a new one gets them first.
        self._standing: dict[Any, tuple[str, str, tuple[Any, ...]]] = {}
        self._numbers = itertools.count()
        self._failure: EngineDeadError | None = None
        self._closed = False
        self._asleep = ""
        self._owner = os.getpid()
        self._inboxes = LoopInboxes()
        self._limit: QueueLimit | None = None
        count = config.data_parallel_size
        if config.max_waiting is not None:
            policy = make_policy(config.scheduling_policy, config.tenant_weights)
            self._limit = QueueLimit(count * config.max_num_seqs, config.max_waiting, policy)
        self.warnings: tuple[str, ...] = ()
        redundant = config.num_redundant_experts if config.lockstep_engines > 1 else None
        prefill, load = config.prefill_replicas, Load(own, packing_threads, count, redundant)
        others: Role = "decode" if prefill else "both"
        roles: list[Role] = ["prefill" if i < prefill else others for i in range(count)]
        self.processes = ReplicaProcesses(roles, load, self, report)

    # ---- commands --------------------------------------------------------------------------------

    def loop_inbox(self) -> LoopInbox:
        """See :class:`sdk.requests.driving.job_driver.JobDriver`."""
        return self._inboxes.current()

    def check_usable(self, *, asleep: bool = False) -> None:
        """See :class:`sdk.requests.driving.job_driver.JobDriver`."""
        check_process(self._owner)
        if self._closed:
            raise EngineClosedError(_CLOSED)
        if self._failure is not None:
            raise self._failure
        if self._asleep and not asleep:
            raise EngineAsleepError(self._asleep)

    @property
    def has_work(self) -> bool:
        """See :class:`sdk.requests.driving.job_driver.JobDriver`."""
        return bool(self._requests)

    def replica_of(self, request_id: str) -> int:
        """The replica that runs a request; 0 for an unknown one."""
        request = self._requests.get(request_id)
        return max(request.replica, 0) if request is not None else 0

    def submit(
        self, jobs: Sequence[Job], sink: OutputSink, *, run: bool = True, goes_on: bool = False
    ) -> None:
        """See :class:`sdk.requests.driving.job_driver.JobDriver`. The replicas run them anyway.

        :raises RequestError: parameters that cannot be pickled, or an id that is in use.
        :raises QueueFullError: too many requests are unfinished; none of these was added.
        """
        self.check_usable()
        made = [self._request(job, sink) for job in jobs]
        with self._lock:
            self.check_usable()
            check_new(jobs, self._requests)
            if self._limit is not None and jobs and not goes_on:
                self._limit.check([one.place for one in self._requests.values()], jobs)
            for request in made:
                self._requests[request.job.request_id] = request
            for request in made:
                self._send(request)

    def _request(self, job: Job, sink: OutputSink) -> _Request:
        params = job.params
        if job.spec.kind == "generate" and params.seed is None:
            with self._lock:  # drawn here, so that the request can run again with the same one
                params = params.with_seed(self._random.getrandbits(63))
            job = job.with_spec(params=params)
        routed = Routed(
            job.request_id,
            job.prompt_token_ids,
            job.cache_salt,
            None if job.adapter is None else job.adapter.key,
            params.tenant,
            params.priority if job.priority is None else job.priority,
            params.max_tokens if job.spec.kind == "generate" else 0,
            job.arrival_time,
        )
        data, place = packed_job(job), Place.of(job, sink)
        return _Request(job, data, routed, place, Progress(params.output_kind))

    def _send(self, request: _Request) -> None:
        """Send a request to the replica that the router chooses."""
        if not self._router.alive:
            self._homeless.append(request)
            return
        request.replica = self._router.choose(request.routed, later=True)
        request.runs += 1
        if self._is_handed_over(request):
            request.prefill = self._prefill_router.choose(request.routed)  # sent at once
            request.attempt = next(self._numbers)
            address = self._addresses[request.replica]
            assert address is not None
            name = request.job.request_id
            message = Prefill(request.attempt, name, request.data, address)
            self.processes.send(request.prefill, message)
        else:
            self._start(request)

    def _is_handed_over(self, request: _Request) -> bool:
        job = request.job
        params = job.params
        return (
            self._prefill_router.alive
            and not request.aborted
            and job.spec.kind == "generate"
            and job.spec.prompt_embeds is None
            and params.prompt_logprobs is None
            and params.guidance_scale == 1.0
            and self._router.uncached(job.request_id) >= _LEAST_HANDED_OVER
        )

    def _start(self, request: _Request, *, handed_over: bool = False) -> None:
        """Let its replica run a request. ``handed_over``: it has the pages of the prompt."""
        name = request.job.request_id
        self._router.sent(name, handed_over=handed_over)
        self.processes.send(request.replica, Add(name, request.data))
        if request.aborted:
            self.processes.send(request.replica, Abort((name,)))

    def _end_prefill(self, request: _Request) -> None:
        """Nobody waits for the hand-over of its prompt any more."""
        name = request.job.request_id
        if request.prefill >= 0:
            self.processes.send(request.prefill, Abort((name,)))
            self._prefill_router.ended(name)
            request.prefill = -1

    def take_aborts(self) -> None:
        """Nothing: replicas take them by themselves."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """See :class:`sdk.requests.driving.job_driver.JobDriver`."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._closed:
                return
            for name in request_ids:
                request = self._requests.get(name)
                if request is None or request.aborted:
                    continue
                request.aborted = True
                if request.prefill >= 0:
                    self._end_prefill(request)
                    self._start(request)
                elif request.replica >= 0:
                    self.processes.send(request.replica, Abort((name,)))

    def run(self, request_ids: Iterable[str]) -> None:
        """See :class:`sdk.requests.driving.job_driver.JobDriver`: the replicas run all requests."""
        self.check_usable()

    def step(self) -> Sequence[Output]:
        """Wait until something was delivered since the last call, if there is work. The sinks have
        it: nothing is returned."""
        with self._changed:
            self.check_usable()
            self._changed.wait_for(lambda: self._has_news or not self._requests or self._closed)
            self.check_usable()
            self._has_news = False
        return ()

    def pump(self, seconds: float) -> None:
        """Wait for ``seconds``, or less if there is no work: the replicas run steps meanwhile."""
        with self._changed:
            self.check_usable()
            self._changed.wait_for(lambda: not self._requests or self._closed, seconds)
            self._has_news = False

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """:raises RequestError: the executors are in other processes."""
        raise RequestError("faults can be injected only with data_parallel_size=1")

    def set_tenant_weight(self, tenant: str | None, weight: float) -> None:
        """See :meth:`sdk.LLM.set_tenant_weight`."""
        self.call_always(("weight", tenant), "", "set_tenant_weight", tenant, weight)

    def estimate(self, prompt: Prompt, params: SamplingParams, priority: int | None) -> Estimate:
        """See :meth:`sdk.LLM.estimate`: the earliest of all replicas."""
        plain = replace(prompt, adapter=None)
        args = plain, params, priority
        found: list[Estimate] = self.call_each(self.alive()[1], "_driver", "estimate", *args)
        return min(found, key=lambda one: (one.first_token is None, one.first_token or 0.0))

    # ---- calls -----------------------------------------------------------------------------------

    def call_all(self, part: str, method: str, *args: Any) -> list[Any]:
        """``part.method(*args)`` in every replica; the results in their order.

        Raises what the first of them raises. A replica that is lost meanwhile has no result.

        :raises EngineDeadError: no replica is left.
        """
        prompts, answers = self.alive()
        return self.call_each([*prompts, *answers], part, method, *args)

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def call_always(self, key: Any, part: str, method: str, *args: Any) -> list[Any]:
        """:meth:`call_all`, and the same in every replica that starts later, until
        :meth:`call_no_more` with this key.
        """
        with self._lock:
            before = self._standing.pop(key, None)
            self._standing[key] = part, method, args
        try:
            return self.call_all(part, method, *args)
        except BaseException:
            self.call_no_more(key)
            with self._lock:
                if before is not None:
                    self._standing[key] = before
            raise

    def call_no_more(self, key: Any) -> None:
        """See :meth:`call_always`. Unknown keys are ignored."""
        with self._lock:
            self._standing.pop(key, None)

    def alive(self) -> tuple[list[int], list[int]]:
        """The replicas that run: those that compute only prompts, and the others. If there is none,
        waits for a while: a lost one is replaced."""
        self.check_usable(asleep=True)  # before the lock, which a forked child may have locked
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._router.alive, _PATIENCE_S)
            return self._prefill_router.replicas, self._router.replicas

    def call_each(self, replicas: Sequence[int], part: str, method: str, *args: Any) -> list[Any]:
        """The same in these replicas."""
        self.check_usable(asleep=True)
        with self._lock:
            self.check_usable(asleep=True)
            waiting = [self._call(one, part, method, args) for one in replicas]
        answers = [self._answer(one) for one in waiting]
        found = [answer.value for answer in answers if answer is not None]
        if not found:
            self.check_usable(asleep=True)
            raise EngineDeadError(f"{method}: no replica is running now; try again")
        return found

    def call_one(self, number: int, part: str, method: str, *args: Any) -> Any:
        """The same in one replica; in another one if it is lost."""
        self.check_usable(asleep=True)
        with self._lock:
            self.check_usable(asleep=True)
            ready = self._router.replicas
            if not ready:
                raise EngineDeadError(f"{method}: no replica is running now; try again")
            chosen = number if number in ready else ready[0]
            waiting = self._call(chosen, part, method, args)
        found = self._answer(waiting)
        return self.call_one(number, part, method, *args) if found is None else found.value

    def _call(self, replica: int, part: str, method: str, args: tuple[Any, ...]) -> _Waiting:
        waiting = _Waiting(threading.Event(), [])
        number = next(self._numbers)
        if self.processes.send(replica, Call(number, part, method, args)):
            self._calls[number] = replica, waiting
        else:  # it was lost just now
            waiting.done.set()
        return waiting

    @staticmethod
    def _answer(waiting: _Waiting) -> Answer | None:
        waiting.done.wait()
        if not waiting.answers:
            return None
        [answer] = waiting.answers
        if answer.error is not None:
            raise answer.error
        return answer

    # ---- events: the thread of the processes calls these -----------------------------------------

    def ready(self, number: int, message: Ready) -> None:
        """See :class:`sdk.cluster.replicas.processes.Events`."""
        with self._lock:
            self.warnings = message.warnings
            self._addresses[number] = message.address
            for part, method, args in self._standing.values():
                self.processes.send(number, Call(-1, part, method, args, first=True))
            self._changed.notify_all()
            if number < self._num_prefill:
                self._prefill_router.joined(number)
                return
            self._router.joined(number)
            waiting, self._homeless = self._homeless, []
            for request in waiting:
                self._send(request)

    def updated(self, number: int, update: Update) -> None:
        """See :class:`sdk.cluster.replicas.processes.Events`."""
        delivered: list[tuple[OutputSink, Output]] = []
        failed: list[tuple[OutputSink, str, Exception]] = []
        with self._lock:
            for output in update.outputs:
                request = self._requests.get(output.request_id)
                if request is None or request.replica != number:
                    continue
                new = request.progress.new(request.with_prompt(output))
                if output.finished:
                    self._forget(request)
                if new is not None:
                    delivered.append((request.place.sink, new))
            for request_id, error in update.failures:
                request = self._requests.get(request_id)
                if request is not None and request.replica == number:
                    self._forget(request)
                    failed.append((request.place.sink, request_id, error))
            if update.report is not None:
                prefills = number < self._num_prefill
                router = self._prefill_router if prefills else self._router
                router.report(number, update.report)
        for sink, output in delivered:
            if not sink.deliver(output) and not output.finished:
                self.abort([output.request_id])
        for sink, request_id, error in failed:
            sink.fail(request_id, error)
        if delivered or failed:
            with self._changed:
                self._has_news = True
                self._changed.notify_all()

    def _forget(self, request: _Request) -> None:
        self._requests.pop(request.job.request_id, None)
        self._end_prefill(request)
        self._router.ended(request.job.request_id)
        if self._limit is not None:
            self._limit.ended(request.place)

    def prefilled(self, number: int, message: Prefilled) -> None:
        """See :class:`.processes.Events`: its replica finds the prompt cached."""
        with self._lock:
            request = self._requests.get(message.request_id)
            if request is None or request.prefill < 0 or request.attempt != message.number:
                return
            self.num_hand_overs += 1
            self.num_failed_hand_overs += message.problem is not None
            request.prefill = -1
            self._prefill_router.ended(message.request_id)
            self._start(request, handed_over=message.problem is None)

    def answered(self, number: int, answer: Answer) -> None:
        """See :class:`sdk.cluster.replicas.processes.Events`."""
        with self._lock:
            _, waiting = self._calls.pop(answer.number, (0, None))
        if answer.error is not None and waiting is None:
            logger.warning("replica %d lacks a setting of the lost one: %s", number, answer.error)
        if waiting is not None:
            waiting.answers.append(answer)
            waiting.done.set()

    def lost(self, number: int, reason: str) -> None:
        """See :class:`sdk.cluster.replicas.processes.Events`: run its requests elsewhere."""
        given_up = []
        with self._lock:
            for name in self._prefill_router.lost(number):
                request = self._requests[name]
                request.prefill = -1
                self._start(request)  # it computes the prompt itself
            requests = [self._requests[name] for name in self._router.lost(number)]
            for request in requests:
                self._end_prefill(request)
                request.replica = -1
                if request.runs >= _MOST_RUNS:
                    self._forget(request)
                    given_up.append(request)
                else:
                    request.progress.restart()
                    self._send(request)
            self._end_calls([n for n, (replica, _) in self._calls.items() if replica == number])
        for request in given_up:
            error = EngineDeadError(
                f"the request was given up: {request.runs} replicas were lost while they ran it; "
                f"the last one: {reason}"
            )
            request.place.sink.fail(request.job.request_id, error)
        with self._changed:
            self._changed.notify_all()

    def failed(self, error: EngineDeadError) -> None:
        """See :class:`sdk.cluster.replicas.processes.Events`."""
        with self._lock:
            self._failure = error
        self._fail_all(error)

    def _end_calls(self, numbers: Sequence[int]) -> None:
        """Let these calls return without an answer."""
        for number in numbers:
            _, waiting = self._calls.pop(number)
            waiting.done.set()

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            unfinished = list(self._requests.values())
            self._requests.clear()
            self._homeless.clear()
            self._end_calls(list(self._calls))
        for request in unfinished:
            request.place.sink.fail(request.job.request_id, error)
        with self._changed:
            self._changed.notify_all()

    # ---- sleeping and closing --------------------------------------------------------------------

    def sleep(self, why: str) -> None:
        """Reject requests from now on, saying ``why``; accept them again with an empty text."""
        self._asleep = why

    def close(self) -> None:
        """See :class:`sdk.requests.driving.job_driver.JobDriver`.

        Takes a few seconds if a step does not end.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            was_closed, self._closed = self._closed, True
        if not was_closed:
            self._fail_all(EngineClosedError("the LLM was closed while this request was running"))
            self.processes.close()
