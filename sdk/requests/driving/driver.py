"""Runs one engine for callers on any thread and any event loop.

The engine itself is single-threaded. Callers leave commands in an inbox and get outputs through an
:class:`OutputSink`. The engine thread runs the steps; it starts on first use and sleeps when there
is nothing to do. A host that wants no thread calls ``step``. Both ways take the same lock and may
be mixed. Commands take effect between two steps, so an abort waits for one chunk of a prefill at
most.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from time import thread_time
from typing import NamedTuple, NoReturn, TypeVar

from sdk.api.errors import (
    EngineAsleepError,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    SdkError,
)
from sdk.api.memory_pool import Lease
from sdk.api.outputs import Estimate
from sdk.api.params import SamplingParams
from sdk.api.scheduling_policy import FairPolicy
from sdk.engine.engine import Engine, Output
from sdk.engine.executor import Executor
from sdk.engine.job import Job
from sdk.quant.safe_repr import safe_repr
from sdk.requests.driving.error_frames import let_go
from sdk.requests.driving.job_driver import OutputSink
from sdk.requests.driving.step_sizes import StepSizes
from sdk.requests.driving.waiting_times import Place, QueueLimit, check_new, estimate
from sdk.requests.driving.wakeups import LoopInbox, LoopInboxes, Wakeups
from sdk.requests.prompts.reader import Prompt

logger = logging.getLogger("sdk")
#: The most seconds of its thread that adding requests may add to a step. One request takes 0.1 ms,
#: one with n = 64 some 5 ms.
_COMMAND_SECONDS = 0.02
#: :meth:`Driver.observe`: how often it looks before it waits for a step to end, and the time
#: between: planning and committing a step take less than a millisecond.
_MOST_LOOKS = 50
_LOOK_AGAIN_S = 0.0005
T = TypeVar("T")
_CLOSED = "this LLM was closed"
#: How long ``close`` waits for a step. Steps take milliseconds unless a worker is stopped.
_CLOSE_TIMEOUT_S = 5.0


class _Add(NamedTuple):
    """Command: add a request."""

    job: Job
    sink: OutputSink


class _Abort(NamedTuple):
    """Command: abort requests."""

    request_ids: tuple[str, ...]


def check_process(owner: int) -> None:
    """:raises EngineClosedError: in a forked child of ``owner``, which has none of its threads."""
    if os.getpid() != owner:
        raise EngineClosedError(
            f"this LLM belongs to process {owner} and cannot be used in the forked child "
            f"{os.getpid()}: create an LLM in the child, or start it with spawn"
        )


class Driver:
    """Owns an engine; see the module. ``close`` is idempotent and safe from any thread."""

    def __init__(self, engine: Engine, *, max_waiting: int | None = None) -> None:
        self._engine = engine
        self._inbox: deque[_Add | _Abort] = deque()
        self._lock = threading.RLock()  # of the inbox and the sinks
        self._wakeups = Wakeups()  # for the engine thread
        self._step_lock = threading.RLock()
        self._lock_waiters: set[int] = set()  # other threads that want the step lock: they go first
        self._stepping: int | None = None  # the thread inside a step
        self._sinks: dict[str, Place] = {}  # of all unfinished requests
        self._limit: QueueLimit | None = None
        if max_waiting is not None:
            slots, policy = engine.scheduler.config.max_num_seqs, engine.scheduler.queues.policy
            self._limit = QueueLimit(slots, max_waiting, policy)
        self._background: set[str] = set()  # requests that the engine thread has to finish
        self._sizes = StepSizes(engine.scheduler)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: EngineDeadError | None = None
        #: The engine's share of a memory pool, closed with it. ``give_back`` is called when other
        #: models need memory.
        self.lease: Lease | None = None
        self.give_back: Callable[[], None] | None = None
        #: Sees requests in their caller's thread, and returns the sink that gets their outputs. It
        #: must return at once, and must not raise.
        self.tap: Callable[[Sequence[Job], OutputSink], OutputSink] | None = None
        self._asleep = ""  # why requests are rejected for now
        self._owner = os.getpid()
        self._inboxes = LoopInboxes()

    def loop_inbox(self) -> LoopInbox:
        """Where outputs for the running event loop go."""
        return self._inboxes.current()

    def check_usable(self, *, asleep: bool = False) -> None:
        """:raises EngineClosedError: after ``close`` or in a forked child.
        :raises EngineDeadError: after a failed step.
        :raises EngineAsleepError: while it sleeps, unless ``asleep`` allows that."""
        check_process(self._owner)
        self._check_open(asleep=asleep)

    def _check_open(self, *, asleep: bool = False) -> None:
        """The same within the process: a step does not ask the system for its process id."""
        if self._closed:
            raise EngineClosedError(_CLOSED)
        if self._failure is not None:
            raise self._failure
        if self._asleep and not asleep:
            raise EngineAsleepError(self._asleep)

    # ---- commands --------------------------------------------------------------------------------

    def submit(
        self, jobs: Sequence[Job], sink: OutputSink, *, run: bool = True, goes_on: bool = False
    ) -> None:
        """Add requests whose outputs go to ``sink``. ``run=False``: the caller does the stepping.
        ``goes_on``: they belong to a call that was accepted, so the queue is not full for them.

        :raises RequestError: inside a logits processor, where the answer would never come.
        :raises QueueFullError: too many requests are unfinished; none of these was added.
        """
        self.check_usable()  # before the lock, which a forked child may have inherited locked
        if run:
            self._check_outside_step()
        with self._lock:
            self.check_usable()
            check_new(jobs, self._sinks)
            if self._limit is not None and jobs and not goes_on:
                self._limit.check(self._sinks.values(), jobs)
            if run:
                self._start()
            if self.tap is not None:
                sink = self.tap(jobs, sink)
            commands = [(_Add(job, sink), Place.of(job, sink)) for job in jobs]
            # without Python calls that a signal handler could interrupt
            for command, place in commands:
                self._sinks[command.job.request_id] = place
                self._inbox.append(command)
            if run:
                self._background.update(job.request_id for job in jobs)
            self._wakeups.notify_all()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at the next step boundary; unknown and finished ids are ignored."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            ids = tuple(name for name in request_ids if name in self._sinks)
            if ids and not self._closed:
                for name in ids:  # what comes next is added after they have gone
                    self._sinks[name] = self._sinks[name]._replace(slots=0)
                self._inbox.append(_Abort(ids))
                self._wakeups.notify_all()

    def take_aborts(self) -> None:
        """Obey :meth:`abort` at once if nobody steps: a host that has aborted its requests may
        never step again, and they hold pages. Waits for nothing."""
        if os.getpid() != self._owner or not self._inbox or not self._must_wait():
            return
        # Owned already: a signal handler, in the middle of what this thread does with the engine.
        owned = self._step_lock._is_owned()  # type: ignore[attr-defined]  # as Condition asks it
        if owned or not self._step_lock.acquire(blocking=False):
            return
        try:
            self._run_steps(self._obey)
        finally:
            self._step_lock.release()

    def _obey(self) -> None:
        if not self._closed and self._failure is None:
            for output in self._take_commands():
                self._deliver(output)

    def run(self, request_ids: Iterable[str]) -> None:
        """Let the engine thread finish submitted requests; finished ids are ignored."""
        self.check_usable()
        self._check_outside_step()
        with self._lock:
            self.check_usable()
            self._start()
            self._background.update(self._sinks.keys() & request_ids)
            self._wakeups.notify_all()

    def _check_outside_step(self) -> None:
        if self._stepping == threading.get_ident():
            raise RequestError(
                "a logits processor cannot step or wait for the LLM that runs it: its own step "
                "would never end"
            )

    def _take_commands(self) -> list[Output]:
        """Add and abort what callers asked for; return the last outputs of aborted requests.

        If a thousand requests come at once, some are added in this step and others in the next.
        """
        outputs: list[Output] = []
        end = thread_time() + _COMMAND_SECONDS
        while self._inbox and thread_time() < end:
            command = self._inbox[0]  # stays until done, so that an interrupt loses no request
            if isinstance(command, _Abort):
                ids = command.request_ids
                outputs += self._engine.abort(ids)
                for request_id in set(ids).difference(o.request_id for o in outputs):
                    self._forget(request_id)  # it has ended, or submitting it was interrupted
            else:
                self._add(*command)
            self._inbox.popleft()
        return outputs

    def _add(self, job: Job, sink: OutputSink) -> None:
        try:
            self._engine.add(job)
        except Exception as error:  # rejected: its caller gets the reason
            self._forget(job.request_id)
            sink.fail(job.request_id, error)

    # ---- the engine thread -----------------------------------------------------------------------

    def _start(self) -> None:
        """Start the engine thread. :raises SdkError: the system has no thread left."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._loop, name="sdk-engine", daemon=True)
        try:
            self._thread.start()
        except BaseException as error:
            self._thread = None
            if isinstance(error, RuntimeError):
                raise SdkError(
                    f"the engine's thread cannot be started ({error}): expected room for one more "
                    "under the limits of this process (ulimit -u, pids.max of its container, "
                    "memory); step() and pump() need no thread"
                ) from error
            raise

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._inbox) or self._engine.has_unfinished

    def _loop(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # its start was interrupted; the next caller starts another thread
        while True:
            while self._worked_while_idle():
                pass
            self._wakeups.wait_for(lambda: self._closed or not self._must_wait())
            if self._closed:
                return
            try:
                self._run_steps(self._steps)
            except (EngineDeadError, EngineClosedError):
                continue  # every sink has been told
            except BaseException as error:  # SystemExit in a callback: no caller above to see it
                with suppress(EngineDeadError):
                    self._fail_engine(
                        EngineDeadError(f"a step failed: {type(error).__name__}: {error}")
                    )

    def _steps(self) -> None:
        while not self._must_wait():
            self._sized_step()

    def _worked_while_idle(self) -> bool:
        """Let the engine do what serving would wait for; whether it did anything. A request that
        comes meanwhile waits for it, some 0.2 s at most."""
        engine = self._engine
        if engine.prepare is None or engine.dead is not None or self._asleep:
            return False
        if not self._step_lock.acquire(blocking=False):
            return False
        try:
            return not (self._closed or self.has_work) and engine.work_while_idle()
        finally:
            self._step_lock.release()
            if (failure := self._engine.dead) is not None:
                with suppress(EngineDeadError):
                    self._fail_engine(failure)

    def _must_wait(self) -> bool:
        """Whether the engine thread has nothing to do, or must not do it now."""
        idle = not self._background or self._failure is not None
        return idle or self._closed or len(self._lock_waiters) > 0

    def _sized_step(self) -> None:
        """One step of the engine thread, no longer than other callers can wait."""
        sizes = self._sizes
        if self._engine.scheduler.repeats and not self._inbox and not sizes.pumped:
            self._step()
            return
        sizes.learn_from_engine_thread(*self._timed_step(sizes.for_engine_thread()))

    def _timed_step(self, most_tokens: int | None) -> tuple[int, float]:
        """Run a step; its tokens (0 where nothing was planned) and its seconds."""
        scheduler, begin = self._engine.scheduler, time.monotonic()
        planned = scheduler.num_steps
        self._step(most_tokens)
        tokens = scheduler.num_tokens if scheduler.num_steps > planned else 0
        if scheduler.images is not None and scheduler.images.encoded_last:
            tokens = 0  # the seconds are those of the tower, too
        return tokens, time.monotonic() - begin

    # ---- steps of other threads ------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Take new commands, run one step, deliver its outputs and return them.

        Takes turns with the engine thread: waits for one of its steps at most.
        """
        self._check_outside_step()

        def one_step() -> list[Output]:
            self._check_open()
            return self._step()

        return self._before_engine_thread(lambda: self._run_steps(one_step))

    def pump(self, seconds: float) -> None:
        """Run the steps that should end within ``seconds``, at least one if there is work.

        For a while the engine thread runs no longer steps than that, so that the next call does
        not wait for a step of hundreds of tokens.
        """
        self._check_outside_step()
        end = time.monotonic() + seconds
        self._sizes.begin_pump(seconds)
        ran = False
        while self.has_work and (not ran or time.monotonic() < end):
            step = partial(self._pumped_step, end, first=not ran)
            if not self._before_engine_thread(partial(self._run_steps, step)):
                break
            ran = True

    def _pumped_step(self, end: float, *, first: bool) -> bool:
        """Run a step of a size that ends in time. ``False``: no size does."""
        self._check_open()
        most = self._sizes.for_pump(end, first=first)
        if most is None:
            return False
        self._sizes.learn_from_pump(*self._timed_step(most))
        return True

    def between_steps(self, action: Callable[[], T]) -> T:
        """What ``action`` returns; no step runs meanwhile."""
        self.check_usable()  # before the lock, which a forked child may have inherited locked
        self._check_outside_step()

        def check_and_act() -> T:
            self._check_open()
            self._engine.settle()
            return action()

        return self._before_engine_thread(check_and_act)

    def try_between_steps(self, action: Callable[[], object]) -> None:
        """Run ``action`` unless a step runs now; the thread may hold another engine's lock."""
        if self._closed or self._stepping == threading.get_ident():
            return
        if self._step_lock.acquire(blocking=False):
            try:
                self._engine.settle()
                action()
            finally:
                self._step_lock.release()

    def sleep(self, action: Callable[[], None], why: str) -> None:
        """Run ``action`` between two steps; from then on requests are rejected, saying ``why``."""

        def rest() -> None:
            action()
            self._asleep = why

        self.between_steps(rest)

    def wake(self, action: Callable[[], None]) -> None:
        """Run ``action`` and accept requests again; no effect unless it sleeps."""

        def rouse() -> None:
            if self._asleep:
                action()
                self._asleep = ""

        self._before_engine_thread(rouse)

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Run the next steps on ``wrap(executor)``: how sdk.testing injects faults."""
        self.between_steps(lambda: self._engine.wrap_executor(wrap))

    def set_tenant_weight(self, tenant: str | None, weight: float) -> None:
        """See :meth:`sdk.LLM.set_tenant_weight`. No step has to wait for it."""
        self.check_usable()
        policy = self._engine.scheduler.queues.policy
        if not isinstance(policy, FairPolicy):
            raise RequestError(
                "set_tenant_weight: weights need scheduling_policy='fair', found "
                f"{safe_repr(self._engine.scheduler.config.policy)}"
            )
        policy.set_weight(tenant, weight)

    @property
    def engine(self) -> Engine:
        """The engine; what changes it must run between two steps."""
        return self._engine

    def observe(self, look: Callable[[], T]) -> T:
        """What ``look`` returns. It changes nothing, and sees the state between two steps.

        It does not wait for a step: while the ranks work, which is nearly all of the time, nothing
        changes. Only if it never meets that, does it wait.
        """
        self.check_usable(asleep=True)
        for _ in range(_MOST_LOOKS):
            if self._step_lock.acquire(blocking=False):
                try:
                    return look()
                finally:
                    self._step_lock.release()
            before = self._engine.standstill
            if before is not None:
                try:
                    found = look()
                except Exception:  # it may have seen half of a change
                    if self._engine.standstill == before:
                        raise
                else:
                    if self._engine.standstill == before:
                        return found
            time.sleep(_LOOK_AGAIN_S)
        return self._before_engine_thread(look)

    def waiting_jobs(self) -> list[Job]:
        """Jobs that the engine has not taken yet."""
        with self._lock:
            return [command.job for command in self._inbox if isinstance(command, _Add)]

    def estimate(self, prompt: Prompt, params: SamplingParams, priority: int | None) -> Estimate:
        """See :meth:`sdk.LLM.estimate`. No step has to wait for it."""
        self.check_usable()
        return estimate(self._engine.scheduler, prompt, params, priority)

    # ---- one step --------------------------------------------------------------------------------

    # The next two are functions, not context managers: a signal handler may raise an exception
    # between the moment a context manager takes the lock and the ``with`` that would release it.

    def _before_engine_thread(self, action: Callable[[], T]) -> T:
        """Run ``action`` with the step lock. The engine thread, which would take it again at once,
        waits.
        """
        me = threading.get_ident()
        try:
            self._lock_waiters.add(me)
            with self._step_lock:
                return action()
        finally:
            self._lock_waiters.discard(me)
            self._wakeups.notify_all()

    def _run_steps(self, action: Callable[[], T]) -> T:
        """Run ``action`` with the step lock: one step, or all until another thread wants the lock.

        Taking it again for every step costs 10 us once the step has emptied the caches.
        """
        with self._step_lock:
            try:
                self._stepping = threading.get_ident()
                return action()
            finally:
                self._stepping = None
                if self._closed:  # perhaps in this step, by a callback or the garbage collector
                    self._release()

    def _step(self, most_tokens: int | None = None) -> list[Output]:
        if self.lease is not None and self.lease.wanted and self.give_back is not None:
            self._engine.settle()
            self.give_back()
        outputs = self._take_commands() if self._inbox else []
        engine = self._engine
        try:
            outputs += engine.step(most_tokens)
        except Exception as error:
            failure = f"a step failed: {type(error).__name__}: {error}"
            self._fail_engine(engine.dead or EngineDeadError(failure))
        if engine.dead is not None:
            self._fail_engine(engine.dead)
        for output in outputs:
            self._deliver(output)
        return outputs

    def _deliver(self, output: Output) -> None:
        place = self._sinks.get(output.request_id)
        if place is None:
            return
        if output.finished:
            self._forget(output.request_id)
        if not place.sink.deliver(output) and not output.finished:
            self._forget(output.request_id)
            self._engine.abort((output.request_id,))

    def _forget(self, request_id: str) -> None:
        with self._lock:
            place = self._sinks.pop(request_id, None)
            self._background.discard(request_id)
            if place is not None and self._limit is not None:
                self._limit.ended(place)

    # ---- failing and closing ---------------------------------------------------------------------

    def _fail_engine(self, failure: EngineDeadError) -> NoReturn:
        """The engine cannot go on: tell every caller, and reject all requests from now on."""
        if self._closed:  # its workers were killed during the step; _release() tells the callers
            raise EngineClosedError(_CLOSED) from failure
        logger.error("engine stopped: %s", failure)
        with self._lock:
            self._failure = failure
        self._fail_all(failure)
        raise failure

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            waiting = list(self._sinks.items())
            self._sinks.clear()
            self._background.clear()
            self._inbox.clear()
        for request_id, place in waiting:
            place.sink.fail(request_id, error)

    def close(self) -> None:
        """Let the step in progress end, fail all waiting requests, give everything back.

        A step that waits for worker processes gets five seconds; then they are killed.
        """
        if os.getpid() != self._owner:
            return  # a forked child shares the memory but owns neither threads nor workers
        with self._lock:
            self._closed = True
            self._wakeups.notify_all()
            failure = self._failure
        if self._stepping == threading.get_ident():
            return  # the step around us closes the engine when it ends
        if not self._step_lock.acquire(timeout=_CLOSE_TIMEOUT_S):
            self._engine.break_off()
            self._step_lock.acquire()
        try:
            self._release()
        finally:
            self._step_lock.release()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
            if failure is not None:
                let_go(failure)  # once more: the calls of the thread ran until now

    def _release(self) -> None:
        with ExitStack() as all_of_it:  # each part runs even if another raises
            closed = EngineClosedError("the LLM was closed while this request was running")
            all_of_it.callback(self._fail_all, closed)
            if self.lease is not None:
                all_of_it.callback(self.lease.close)
            failure, self._failure = self._failure, None
            if failure is not None:
                all_of_it.callback(let_go, failure)
            self._engine.close()
