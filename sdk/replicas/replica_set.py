"""Runs jobs on several replicas: processes with one engine each.

One thread moves all messages. A request is sent to the replica that the router chooses, and stays
known here with its parameters until its last output has come. If its replica is lost, it runs again
on another one, from its beginning, with the same seed: answers are bitwise the same, and what its
caller has already got is left out (``replay.py``). A lost replica is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import random
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sdk.config import EngineConfig
from sdk.engine.engine import Output
from sdk.engine.scheduling.policy import make_policy
from sdk.errors import EngineAsleepError, EngineClosedError, EngineDeadError, RequestError
from sdk.executors.base import Executor
from sdk.outputs import Estimate
from sdk.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.replicas.connection import Connection
from sdk.replicas.messages import (
    Abort,
    Add,
    Answer,
    Beat,
    Call,
    Ended,
    Failed,
    Forked,
    Kill,
    Load,
    Loaded,
    Lost,
    Progress as LoadProgress,
    Ready,
    Stop,
    Update,
    packed_job,
)
from sdk.replicas.parent_process import ParentProcess, describe
from sdk.replicas.replay import Progress
from sdk.replicas.routing import Routed, Router
from sdk.requests.driver import check_process
from sdk.requests.job import Job, OutputSink
from sdk.requests.loop_inbox import LoopInbox
from sdk.requests.prompts import Prompt
from sdk.requests.queue_limit import Place, QueueLimit

logger = logging.getLogger("sdk")

#: A replica that gives no sign of life for so long is killed. It gives one every 0.5 s.
_SILENCE_S = 3.0
#: How often the thread looks for silent replicas.
_TICK_S = 0.25
#: A request that was on so many replicas when they were lost is not tried again: it may be the
#: reason.
_MOST_RUNS = 3
#: A replica that was lost so often in a row before it was ready is not replaced again.
_MOST_STARTS = 3
#: Seconds that a start may take.
_START_S = 600.0
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
    runs: int = 0
    aborted: bool = False


@dataclass
class _Replica:
    """A replica as it is known here."""

    number: int
    connection: Connection | None = None
    launch: int = -1
    pid: int = 0
    is_ready: bool = False
    heard: float = 0.0
    is_cut: bool = False  # its connection was closed; its parent will say why
    starts: int = 0  # in a row without being ready
    reason: str = ""  # why it was lost
    calls: dict[int, _Waiting] = field(default_factory=dict)


class _Waiting(NamedTuple):
    """A caller that waits for the answer to a call."""

    done: threading.Event
    answers: list[Answer]


class ReplicaSet:
    """See the module, and :class:`sdk.requests.job.JobDriver`.

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
        self._count = config.data_parallel_size
        self._router = Router(config.replica_routing)
        self._load = Load(own, packing_threads)
        self._report_load = report
        self._random = random.Random(config.seed)
        self._lock = threading.RLock()  # of everything below
        self._changed = threading.Condition(self._lock)
        self._requests: dict[str, _Request] = {}
        self._homeless: list[_Request] = []  # no replica is ready for them
        self._delivered: list[Output] = []  # since the last step()
        self._numbers = itertools.count()
        self._failure: EngineDeadError | None = None
        self._closed = False
        self._asleep = ""
        self._owner = os.getpid()
        self._inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopInbox] = (
            weakref.WeakKeyDictionary()
        )
        self._limit: QueueLimit | None = None
        if config.max_waiting is not None:
            policy = make_policy(config.scheduling_policy, config.tenant_weights)
            slots = self._count * config.max_num_seqs
            self._limit = QueueLimit(slots, config.max_waiting, policy)
        self.warnings: tuple[str, ...] = ()
        self.num_replaced = 0
        self._selector = selectors.DefaultSelector()
        self._wake_end, wake = socket.socketpair()
        self._wake_end.setblocking(False)
        wake.setblocking(False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        self._woken = wake
        self._replicas = [_Replica(number) for number in range(self._count)]
        self._parent: ParentProcess | None = None
        self._is_loaded = False
        self._load_error: Exception | None = None
        self._last_tick = time.monotonic()
        try:
            self._start_parent()
            self._await_start()
        except BaseException:
            self._closed = True
            self._release()
            raise
        self._thread = threading.Thread(target=self._loop, name="sdk-replicas", daemon=True)
        self._thread.start()

    # ---- starting --------------------------------------------------------------------------------

    def _start_parent(self) -> None:
        self._is_loaded = False
        self._parent = ParentProcess(self._load)
        self._watch(self._parent.connection, self._parent)

    def _await_start(self) -> None:
        """Wait in the constructor until all replicas run."""
        end = time.monotonic() + _START_S
        while not all(one.is_ready for one in self._replicas):
            self._turn()
            if self._load_error is not None:
                raise self._load_error
            for one in self._replicas:
                if one.reason:
                    raise EngineDeadError(f"replica {one.number} did not start: {one.reason}")
            if time.monotonic() > end:
                raise EngineDeadError(f"the replicas did not start within {_START_S:g} s")

    def _fork(self, one: _Replica) -> None:
        assert self._parent is not None
        one.launch = next(self._numbers)
        one.connection = self._parent.fork(one.launch)
        one.is_ready, one.pid, one.heard = False, 0, time.monotonic()
        one.starts += 1
        one.is_cut, one.reason = False, ""
        self._watch(one.connection, one)

    # ---- commands --------------------------------------------------------------------------------

    def loop_inbox(self) -> LoopInbox:
        """See :class:`sdk.requests.job.JobDriver`."""
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._inboxes.get(loop)
            if found is None:
                found = self._inboxes[loop] = LoopInbox(loop)
            return found

    def check_usable(self, *, asleep: bool = False) -> None:
        """See :class:`sdk.requests.job.JobDriver`."""
        check_process(self._owner)
        if self._closed:
            raise EngineClosedError(_CLOSED)
        if self._failure is not None:
            raise self._failure
        if self._asleep and not asleep:
            raise EngineAsleepError(self._asleep)

    @property
    def has_work(self) -> bool:
        """See :class:`sdk.requests.job.JobDriver`."""
        return bool(self._requests)

    @property
    def num_ready(self) -> int:
        """The replicas that run."""
        return sum(one.is_ready for one in self._replicas)

    def replica_of(self, request_id: str) -> int:
        """The replica that runs a request; 0 for an unknown one."""
        request = self._requests.get(request_id)
        return max(request.replica, 0) if request is not None else 0

    def submit(
        self, jobs: Sequence[Job], sink: OutputSink, *, run: bool = True, goes_on: bool = False
    ) -> None:
        """See :class:`sdk.requests.job.JobDriver`. The replicas run them in any case.

        :raises RequestError: parameters that cannot be pickled, or an id that is in use.
        :raises QueueFullError: too many requests are unfinished; none of these was added.
        """
        self.check_usable()
        made = [self._request(job, sink) for job in jobs]
        with self._lock:
            self.check_usable()
            for job in jobs:
                if job.request_id in self._requests:
                    raise RequestError(
                        f"request_id: {safe_repr(job.request_id)} belongs to an unfinished "
                        "request; use another id"
                    )
            if self._limit is not None and jobs and not goes_on:
                self._limit.check([one.place for one in self._requests.values()], jobs)
            for request in made:
                self._requests[request.job.request_id] = request
            for request in made:
                self._send(request)
        self._wake()

    def _request(self, job: Job, sink: OutputSink) -> _Request:
        params = job.params
        if job.kind == "generate" and params.seed is None:
            with self._lock:  # drawn here, so that the request can run again with the same one
                params = params.with_seed(self._random.getrandbits(63))
            job = replace(job, params=params)
        routed = Routed(
            job.request_id,
            job.prompt_token_ids,
            job.cache_salt,
            None if job.adapter is None else job.adapter.key,
            params.tenant,
            params.priority if job.priority is None else job.priority,
            params.max_tokens if job.kind == "generate" else 0,
            job.arrival_time,
        )
        data, place = packed_job(job), Place.of(job, sink)
        return _Request(job, data, routed, place, Progress(params.output_kind))

    def _send(self, request: _Request) -> None:
        """Send a request to the replica that the router chooses."""
        if not self._router.replicas:
            self._homeless.append(request)
            return
        number = self._router.choose(request.routed)
        connection = self._replicas[number].connection
        assert connection is not None
        request.replica = number
        request.runs += 1
        connection.queue(Add((request.data,)))
        if request.aborted:
            connection.queue(Abort((request.job.request_id,)))

    def abort(self, request_ids: Iterable[str]) -> None:
        """See :class:`sdk.requests.job.JobDriver`."""
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
                if request.replica >= 0:
                    connection = self._replicas[request.replica].connection
                    if connection is not None:
                        connection.queue(Abort((name,)))
        self._wake()

    def run(self, request_ids: Iterable[str]) -> None:
        """See :class:`sdk.requests.job.JobDriver`: the replicas run all requests."""
        self.check_usable()

    def step(self) -> Sequence[Output]:
        """Wait until something was delivered, if there is work; what was delivered since the last
        call."""
        with self._changed:
            self.check_usable()
            self._changed.wait_for(lambda: self._delivered or not self._requests or self._closed)
            self.check_usable()
            outputs, self._delivered = self._delivered, []
            return outputs

    def pump(self, seconds: float) -> None:
        """Wait for ``seconds``, or less if there is no work: the replicas run steps meanwhile."""
        with self._changed:
            self.check_usable()
            self._changed.wait_for(lambda: not self._requests or self._closed, seconds)
            self._delivered.clear()

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """:raises RequestError: the executors are in other processes."""
        raise RequestError("faults can be injected only with data_parallel_size=1")

    def set_tenant_weight(self, tenant: str | None, weight: float) -> None:
        """See :meth:`sdk.LLM.set_tenant_weight`."""
        self.call_all("", "set_tenant_weight", tenant, weight)

    def estimate(self, prompt: Prompt, params: SamplingParams, priority: int | None) -> Estimate:
        """See :meth:`sdk.LLM.estimate`: the earliest of all replicas."""
        plain = replace(prompt, adapter=None)
        found: list[Estimate] = self.call_all("_driver", "estimate", plain, params, priority)
        return min(found, key=lambda one: (one.first_token is None, one.first_token or 0.0))

    # ---- calls -----------------------------------------------------------------------------------

    def call_all(self, part: str, method: str, *args: Any) -> list[Any]:
        """``part.method(*args)`` in every replica; the results in their order.

        Raises what the first of them raises. A replica that is lost meanwhile has no result.

        :raises EngineDeadError: no replica is left.
        """
        with self._lock:
            self.check_usable(asleep=True)
            waiting = [
                self._call(one, part, method, args) for one in self._replicas if one.is_ready
            ]
        self._wake()
        answers = [self._answer(one) for one in waiting]
        found = [answer.value for answer in answers if answer is not None]
        if not found:
            self.check_usable(asleep=True)
            raise EngineDeadError(f"{method}: no replica is running now; try again")
        return found

    def call_one(self, number: int, part: str, method: str, *args: Any) -> Any:
        """The same in one replica; in another one if it is lost."""
        with self._lock:
            self.check_usable(asleep=True)
            ready = [one for one in self._replicas if one.is_ready]
            if not ready:
                raise EngineDeadError(f"{method}: no replica is running now; try again")
            one = next((one for one in ready if one.number == number), ready[0])
            waiting = self._call(one, part, method, args)
        self._wake()
        found = self._answer(waiting)
        return self.call_one(number, part, method, *args) if found is None else found.value

    def _call(self, one: _Replica, part: str, method: str, args: tuple[Any, ...]) -> _Waiting:
        waiting = _Waiting(threading.Event(), [])
        number = next(self._numbers)
        one.calls[number] = waiting
        assert one.connection is not None
        one.connection.queue(Call(number, part, method, args))
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

    # ---- the thread ------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._closed:
            try:
                self._turn()
            except BaseException as error:
                logger.exception("the replicas' thread failed")
                self._fail(EngineDeadError(f"the replicas' thread failed: {error!r}"))
                return

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._wake_end.send(b"\0")

    def _watch(self, connection: Connection, owner: ParentProcess | _Replica) -> None:
        self._selector.register(connection.socket, selectors.EVENT_READ, owner)

    def _turn(self) -> None:
        """Move messages once, and look for silent replicas."""
        self._flush()
        for key, _ in self._selector.select(_TICK_S):
            owner = key.data
            if owner is None:
                with suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
            elif isinstance(owner, ParentProcess):
                if owner is self._parent:
                    self._read_parent(owner)
            elif owner.connection is not None and owner.connection.socket is key.fileobj:
                self._read(owner)
        now = time.monotonic()
        if now - self._last_tick > _TICK_S:
            self._tick(now)

    def _flush(self) -> None:
        """Send what waits, and be woken when a full socket takes more."""
        owners: list[tuple[Connection | None, ParentProcess | _Replica]] = [
            (one.connection, one) for one in self._replicas
        ]
        if self._parent is not None:
            owners.append((self._parent.connection, self._parent))
        for connection, owner in owners:
            if connection is None or (isinstance(owner, _Replica) and owner.is_cut):
                continue
            events = selectors.EVENT_READ
            try:
                with self._lock:
                    connection.flush()
            except OSError:
                continue  # its end is read below
            if connection.has_waiting:
                events |= selectors.EVENT_WRITE
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, owner)

    def _tick(self, now: float) -> None:
        """Kill replicas that are silent: stopped, or stuck."""
        late, self._last_tick = now - self._last_tick, now
        for one in self._replicas:
            if late > _SILENCE_S / 2:
                one.heard = now  # this process was stopped, not the replica
            elif (one.is_ready or one.is_cut) and now - one.heard > _SILENCE_S:
                self._lost(one, f"gave no sign of life for {_SILENCE_S:g} s")

    # ---- messages from the parent ----------------------------------------------------------------

    def _read_parent(self, parent: ParentProcess) -> None:
        try:
            messages = parent.connection.read()
        except (EOFError, OSError):
            self._parent_lost(parent)
            return
        for message in messages:
            match message:
                case LoadProgress(done, total):
                    self._report_load(done, total)
                case Loaded():
                    self._is_loaded = True
                    for one in self._replicas:
                        if one.starts < _MOST_STARTS:
                            self._fork(one)
                case Failed(error):
                    self._load_error = error
                    if hasattr(self, "_thread"):
                        self._fail(EngineDeadError(f"the model cannot be read again: {error}"))
                case Forked(launch, pid):
                    for one in self._replicas:
                        if one.launch == launch:
                            one.pid = pid
                case Ended(launch, code):
                    for one in self._replicas:
                        if one.launch == launch:
                            self._lost(one, f"{describe(code)}{parent.last_words()}")

    def _parent_lost(self, parent: ParentProcess) -> None:
        """The parent has ended, and the kernel has killed all replicas with it."""
        words = parent.last_words()
        self._selector.unregister(parent.connection.socket)
        parent.close(0.0)
        self._parent = None
        if not hasattr(self, "_thread"):
            self._load_error = EngineDeadError(f"the parent of the replicas ended{words}")
            return
        logger.warning("the parent of the replicas ended; it is started again%s", words)
        for one in self._replicas:
            self._lost(one, f"the parent of the replicas ended{words}")
        if self._failure is None:
            self._start_parent()

    # ---- messages from replicas ------------------------------------------------------------------

    def _read(self, one: _Replica) -> None:
        assert one.connection is not None
        try:
            messages = one.connection.read()
        except (EOFError, OSError):
            self._selector.unregister(one.connection.socket)
            one.is_cut = True
            return
        one.heard = time.monotonic()
        for message in messages:
            match message:
                case Update(outputs, failures, report):
                    self._update(one, outputs, failures, report)
                case Beat():
                    pass
                case Answer():
                    with self._lock:
                        waiting = one.calls.pop(message.number, None)
                    if waiting is not None:
                        waiting.answers.append(message)
                        waiting.done.set()
                case Ready(warnings):
                    self._ready(one, warnings)
                case Lost(reason):
                    self._lost(one, reason)
                    return

    def _ready(self, one: _Replica, warnings: tuple[str, ...]) -> None:
        with self._lock:
            one.is_ready, one.starts = True, 0
            self.warnings = warnings
            self._router.joined(one.number)
            waiting, self._homeless = self._homeless, []
            for request in waiting:
                self._send(request)

    def _update(
        self,
        one: _Replica,
        outputs: Sequence[Output],
        failures: Sequence[tuple[str, Exception]],
        report: Any,
    ) -> None:
        delivered: list[tuple[OutputSink, Output]] = []
        failed: list[tuple[OutputSink, str, Exception]] = []
        with self._lock:
            for output in outputs:
                request = self._requests.get(output.request_id)
                if request is None or request.replica != one.number:
                    continue
                new = request.progress.new(output)
                if output.finished:
                    self._forget(request)
                if new is not None:
                    delivered.append((request.place.sink, new))
            for request_id, error in failures:
                request = self._requests.get(request_id)
                if request is not None and request.replica == one.number:
                    self._forget(request)
                    failed.append((request.place.sink, request_id, error))
            if report is not None:
                self._router.report(one.number, report)
        for sink, output in delivered:
            if not sink.deliver(output) and not output.finished:
                self.abort([output.request_id])
        for sink, request_id, error in failed:
            sink.fail(request_id, error)
        if delivered or failed:
            with self._changed:
                self._delivered += [output for _, output in delivered]
                self._changed.notify_all()

    def _forget(self, request: _Request) -> None:
        self._requests.pop(request.job.request_id, None)
        self._router.ended(request.job.request_id)
        if self._limit is not None:
            self._limit.ended(request.place)

    # ---- lost replicas ---------------------------------------------------------------------------

    def _lost(self, one: _Replica, reason: str) -> None:
        """A replica is gone: replace it, and run its requests elsewhere."""
        if one.connection is None:
            return
        with self._lock:
            connection, one.connection = one.connection, None
            one.is_ready, one.reason = False, reason
            if not one.is_cut:
                self._selector.unregister(connection.socket)
            connection.close()
            calls, one.calls = one.calls, {}
            lost = [self._requests[name] for name in self._router.lost(one.number)]
        for waiting in calls.values():
            waiting.done.set()
        if not hasattr(self, "_thread") or self._closed:
            return
        logger.warning("replica %d was lost: it %s", one.number, reason)
        parent = self._parent
        if parent is not None and self._is_loaded:
            parent.connection.queue(Kill(one.launch))
            if one.starts < _MOST_STARTS:
                self.num_replaced += 1
                self._fork(one)
        if all(two.connection is None and two.starts >= _MOST_STARTS for two in self._replicas):
            self._fail(EngineDeadError(f"all replicas were lost; the last one: {reason}"))
            return
        self._run_again(lost, reason)

    def _run_again(self, lost: Sequence[_Request], reason: str) -> None:
        failed = []
        with self._lock:
            for request in lost:
                request.replica = -1
                if request.runs >= _MOST_RUNS:
                    self._forget(request)
                    failed.append(request)
                else:
                    request.progress.restart()
                    self._send(request)
        for request in failed:
            error = EngineDeadError(
                f"the request was given up: {request.runs} replicas were lost while they ran it; "
                f"the last one: {reason}"
            )
            request.place.sink.fail(request.job.request_id, error)
        with self._changed:
            self._changed.notify_all()

    # ---- failing and closing ---------------------------------------------------------------------

    def _fail(self, failure: EngineDeadError) -> None:
        logger.error("engine stopped: %s", failure)
        with self._lock:
            self._failure = failure
        self._fail_all(failure)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            unfinished = list(self._requests.values())
            self._requests.clear()
            self._homeless.clear()
            calls = [waiting for one in self._replicas for waiting in one.calls.values()]
            for one in self._replicas:
                one.calls = {}
        for waiting in calls:
            waiting.done.set()
        for request in unfinished:
            request.place.sink.fail(request.job.request_id, error)
        with self._changed:
            self._changed.notify_all()

    def sleep(self, why: str) -> None:
        """Reject requests from now on, saying ``why``; accept them again with an empty text."""
        self._asleep = why

    def close(self) -> None:
        """See :class:`sdk.requests.job.JobDriver`. Takes a few seconds if a step does not end."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._fail_all(EngineClosedError("the LLM was closed while this request was running"))
        self._release()

    def _release(self) -> None:
        for one in self._replicas:
            if one.connection is not None:
                one.connection.queue(Stop())
                with suppress(OSError):
                    one.connection.flush()
                one.connection.close()
                one.connection = None
        if self._parent is not None:
            self._parent.close()
            self._parent = None
        self._selector.close()
        self._woken.close()
        self._wake_end.close()
