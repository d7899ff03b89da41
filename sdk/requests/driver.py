"""Runs one engine for callers on any thread and any event loop.

The engine itself is single-threaded. Callers leave work in an inbox and get their outputs through a
listener; one thread steps the engine, started on first use and asleep when there is nothing to do.
A host that wants no thread steps itself (``step``): both ways take the same lock and may be mixed.
Commands take effect between two steps, so an abort acts within one chunk of a prefill.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from time import thread_time
from typing import NoReturn, Protocol, TypeVar

from sdk.engine.engine import Engine, Output
from sdk.engine.plan import RequestKind
from sdk.engine.scheduling.step_costs import StepCosts
from sdk.errors import EngineClosedError, EngineDeadError, RequestError, SdkError
from sdk.memory.pool import Lease
from sdk.params import SamplingParams
from sdk.quant.safe_repr import safe_repr
from sdk.requests.wakeups import Wakeups
from sdk.sampling.resolved import ResolvedParams
from sdk.text.stops import StopStrings

logger = logging.getLogger("sdk")
#: What taking requests may add to a step, in seconds of its thread. One takes 0.1 ms, one with
#: n = 64 some 5 ms.
_COMMAND_SECONDS = 0.02
T = TypeVar("T")
_CLOSED = "this LLM was closed"
#: For a step when the LLM is closed: it takes milliseconds unless a worker is stopped.
_PATIENCE_S = 5.0
#: While other requests decode, a step with a prompt is to end within this time: 256 tokens at the
#: end of a prompt of 7,000 took 1.2 s. Each step is longer than the last by what the context grew.
_BESIDE_OTHERS_S = 0.35
#: But it may have so many tokens: reading the weights, once in each step, takes a tenth of the time
#: then, whatever the size of the model (0.5 bytes a weight, 20 GB/s, 0.5e12 operations/s).
_LEAST_BESIDE_OTHERS = 64
#: After a call of pump the next one is expected for so long.
_PACED_S = 1.0


class Listener(Protocol):
    """Where the outputs of a request go. Called by the stepping thread: must return at once."""

    def deliver(self, output: Output) -> bool:
        """Take one output; ``False`` means nobody listens any more, and the request is aborted."""

    def fail(self, request_id: str, error: Exception) -> None:
        """The request is over without a final output."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request on its way to the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    listener: Listener
    prompt: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kind: RequestKind = "generate"
    arrival_time: float | None = None
    resolved: ResolvedParams = field(default_factory=ResolvedParams)
    negative_prompt_token_ids: tuple[int, ...] | None = None
    stops: StopStrings | None = None
    result_bytes: int = 0


def check_process(owner: int) -> None:
    """:raises EngineClosedError: in a forked child of ``owner``, which has none of its threads."""
    if os.getpid() != owner:
        raise EngineClosedError(
            f"this LLM belongs to process {owner} and cannot be used in the forked child "
            f"{os.getpid()}: create an LLM in the child, or start it with spawn"
        )


class Driver:
    """Owns an engine; see the module. ``close`` is idempotent and safe from any thread."""

    def __init__(
        self, engine: Engine, current: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """``current``: inside of it the device of the engine is the thread's current one."""
        self._engine = engine
        self._current = current
        self._inbox: deque[Job | tuple[str, ...]] = deque()
        self._lock = threading.RLock()  # of the inbox and the listeners
        self._wakeups = Wakeups()  # for the stepping thread
        self._step_lock = threading.RLock()
        self._guests: set[int] = set()  # other threads that want the lock: they go first
        self._stepping: int | None = None  # the thread inside a step
        self._listeners: dict[str, Listener] = {}
        self._awaited: set[str] = set()  # of these, what the stepping thread is there for
        self._costs = StepCosts()  # of pump's steps
        self._tokens_per_second: float | None = None  # of the stepping thread's last large step
        self._pace: tuple[float, float] | None = None  # of the last pump: seconds, and until when
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failure: EngineDeadError | None = None
        #: Of a memory pool, closed at the end; ``give_back`` is called where others want of it.
        self.lease: Lease | None = None
        self.give_back: Callable[[], None] | None = None
        self._asleep = ""  # why requests are refused for now
        self._owner = os.getpid()

    def check_usable(self, *, asleep: bool = False) -> None:
        """:raises EngineClosedError: after ``close`` or in a forked child.
        :raises EngineDeadError: after a failed step.
        :raises RequestError: while it sleeps, unless ``asleep`` says that it may."""
        check_process(self._owner)
        self._check_open(asleep=asleep)

    def _check_open(self, *, asleep: bool = False) -> None:
        """The same within the process: a step does not ask the system which one that is."""
        if self._closed:
            raise EngineClosedError(_CLOSED)
        if self._failure is not None:
            raise self._failure
        if self._asleep and not asleep:
            raise RequestError(self._asleep)

    def submit(self, jobs: Sequence[Job], *, run: bool = True) -> None:
        """Hand over requests; ``run=False`` leaves the stepping to the caller.

        :raises RequestError: in a logits processor, where the answer would be waited for in vain.
        """
        self.check_usable()  # before the lock, which a forked child may have inherited locked
        if run:
            self._refuse_inside_step()
        with self._lock:
            self.check_usable()
            for job in jobs:
                if job.request_id in self._listeners:
                    raise RequestError(
                        f"request_id: {safe_repr(job.request_id)} is that of an unfinished request"
                    )
            if run:
                self._start()
            for job in jobs:
                self._listeners[job.request_id] = job.listener
                self._inbox.append(job)
            if run:
                self._awaited.update(job.request_id for job in jobs)
            self._wakeups.notify_all()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests at the next step boundary; unknown and finished ids are ignored."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            ids = tuple(name for name in request_ids if name in self._listeners)
            if ids and not self._closed:
                self._inbox.append(ids)
                self._wakeups.notify_all()

    def run(self, request_ids: Iterable[str]) -> None:
        """Leave requests that were submitted to the stepping thread; finished ids are ignored."""
        self.check_usable()
        self._refuse_inside_step()
        with self._lock:
            self.check_usable()
            self._start()
            self._awaited.update(self._listeners.keys() & request_ids)
            self._wakeups.notify_all()

    def _refuse_inside_step(self) -> None:
        if self._stepping == threading.get_ident():
            raise RequestError(
                "a logits processor cannot step or wait for the LLM that runs it: its own step "
                "would never end"
            )

    def _start(self) -> None:
        """Have a stepping thread. :raises SdkError: the system has none to give."""
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
        return bool(self._inbox) or self._engine.has_unfinished

    def _loop(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return  # whoever started it was interrupted and will start another
        while True:
            self._wakeups.wait_for(lambda: self._closed or not self._must_wait())
            if self._closed:
                return
            try:
                self._run_steps(self._steps)
            except (EngineDeadError, EngineClosedError):
                continue  # every listener has been told
            except BaseException as error:  # SystemExit in a callback: nobody above would tell them
                with suppress(EngineDeadError):
                    self._die(EngineDeadError(f"a step failed: {type(error).__name__}: {error}"))

    def _steps(self) -> None:
        while not self._must_wait():
            self._sized_step()

    def _must_wait(self) -> bool:
        """Whether the stepping thread has nothing to do, or is not to do it."""
        idle = not self._awaited or self._failure is not None
        return idle or self._closed or len(self._guests) > 0

    def step(self) -> list[Output]:
        """Take new commands, run one step, deliver its outputs and return them.

        Takes turns with the stepping thread: waits for one step of it at most.
        """
        self._refuse_inside_step()

        def one_step() -> list[Output]:
            self._check_open()
            return self._step()

        return self._in_turn(lambda: self._run_steps(one_step))

    def pump(self, seconds: float) -> None:
        """Run the steps that are expected to end within ``seconds``, at least one if there is work.

        The stepping thread makes no longer steps than that for a while, so that the next call does
        not wait for one of hundreds of tokens.
        """
        self._refuse_inside_step()
        begin = time.monotonic()
        end = begin + seconds
        self._pace = seconds, begin + _PACED_S
        ran = False
        while self.has_work and (not ran or time.monotonic() < end):
            step = partial(self._paced_step, end, first=not ran)
            if not self._in_turn(partial(self._run_steps, step)):
                break
            ran = True

    def _paced_step(self, end: float, *, first: bool) -> bool:
        """Run a step of a size that fits. False: none does, and it is not the ``first``."""
        self._check_open()
        scheduler, begin = self._engine.scheduler, time.monotonic()
        if first:
            most = self._costs.first_tokens(end - begin)
        else:
            most = self._costs.most_tokens(end - begin)
            if most < scheduler.least_tokens:
                return False
        tokens, seconds = self._timed_step(most)
        if tokens:
            self._costs.learn(tokens, seconds)
        return True

    def _sized_step(self) -> None:
        """A step of the stepping thread. Prompts make it no longer than others can wait: those
        whose answers are under way, or a host that pumps.
        """
        scheduler, most = self._engine.scheduler, None
        if self._pace is not None:
            seconds, until = self._pace
            if time.monotonic() < until:
                most = self._costs.first_tokens(seconds)
            else:
                self._pace = None
        elif scheduler.repeats and not self._inbox:
            self._step()
            return
        elif scheduler.decodes:
            most = self._beside_others()
        tokens, seconds = self._timed_step(most)
        if tokens >= _LEAST_BESIDE_OTHERS:
            self._tokens_per_second = tokens / seconds

    def _timed_step(self, most_tokens: int | None) -> tuple[int, float]:
        """Run a step: its tokens, 0 where there was nothing to plan, and its seconds."""
        scheduler, begin = self._engine.scheduler, time.monotonic()
        planned = scheduler.num_steps
        self._step(most_tokens)
        tokens = scheduler.num_tokens if scheduler.num_steps > planned else 0
        return tokens, time.monotonic() - begin

    def _beside_others(self) -> int | None:
        """Tokens of a step that keeps those who decode waiting no longer than they should be."""
        if self._tokens_per_second is None:
            return None
        return max(int(self._tokens_per_second * _BESIDE_OTHERS_S), _LEAST_BESIDE_OTHERS)

    # These two are functions and no context managers: an exception of a signal handler can be
    # raised between a context manager's taking the lock and the ``with`` that would release it.

    def _in_turn(self, action: Callable[[], T]) -> T:
        """Run ``action`` with the step lock, ahead of the stepping thread, which would take it
        again at once.
        """
        me = threading.get_ident()
        try:
            self._guests.add(me)
            with self._step_lock, self._current():
                return action()
        finally:
            self._guests.discard(me)
            self._wakeups.notify_all()

    def _run_steps(self, action: Callable[[], T]) -> T:
        """Run ``action`` with the step lock: one step, or all until somebody else wants the lock.

        Taking it again for every step costs 10 us after the step has emptied the caches.
        """
        with self._step_lock, self._current():
            try:
                self._stepping = threading.get_ident()
                return action()
            finally:
                self._stepping = None
                if self._closed:  # in a step, perhaps: by a callback or the garbage collector
                    self._end()

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
            self._die(engine.dead or EngineDeadError(failure))
        if engine.dead is not None:
            self._die(engine.dead)
        for output in outputs:
            self._deliver(output)
        return outputs

    def _take_commands(self) -> list[Output]:
        """Add and abort what callers asked for; the last outputs of aborted requests.

        Of a thousand requests at once some are taken in this step and the others in the next ones.
        """
        outputs: list[Output] = []
        end = thread_time() + _COMMAND_SECONDS
        while self._inbox and thread_time() < end:
            command = self._inbox[0]  # stays until done: an interrupt loses no request
            if isinstance(command, tuple):
                outputs += self._engine.abort(command)
                for request_id in set(command).difference(o.request_id for o in outputs):
                    self._forget(request_id)  # submitting it was interrupted, or it ended before
                self._inbox.popleft()
                continue
            try:
                self._engine.add_request(
                    command.request_id,
                    command.prompt_token_ids,
                    command.params,
                    prompt_text=command.prompt,
                    priority=command.priority,
                    cache_salt=command.cache_salt,
                    kind=command.kind,
                    arrival_time=command.arrival_time,
                    resolved=command.resolved,
                    negative_prompt_token_ids=command.negative_prompt_token_ids,
                    stops=command.stops,
                    result_bytes=command.result_bytes,
                )
            except Exception as error:  # refused: this request's caller gets the reason
                self._forget(command.request_id)
                command.listener.fail(command.request_id, error)
            self._inbox.popleft()
        return outputs

    def _deliver(self, output: Output) -> None:
        listener = self._listeners.get(output.request_id)
        if listener is None:
            return
        if output.finished:
            self._forget(output.request_id)
        if not listener.deliver(output) and not output.finished:
            self._forget(output.request_id)
            self._engine.abort((output.request_id,))

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._listeners.pop(request_id, None)
            self._awaited.discard(request_id)

    def _die(self, failure: EngineDeadError) -> NoReturn:
        """The engine cannot go on: tell everybody, refuse everything from now on."""
        if self._closed:  # its workers were ended under the step: _end() tells everybody
            raise EngineClosedError(_CLOSED) from failure
        logger.error("engine stopped: %s", failure)
        with self._lock:
            self._failure = failure
        self._fail_all(failure)
        raise failure

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            waiting = list(self._listeners.items())
            self._listeners.clear()
            self._awaited.clear()
            self._inbox.clear()
        for request_id, listener in waiting:
            listener.fail(request_id, error)

    def metrics(self) -> dict[str, float]:
        """A snapshot of the engine's counters."""
        return self._engine.get_metrics()

    def between_steps(self, action: Callable[[], T]) -> T:
        """What ``action`` returns; no step runs meanwhile."""
        self.check_usable()  # before the lock, which a forked child may have inherited locked
        self._refuse_inside_step()

        def check_and_act() -> T:
            self._check_open()
            self._engine.settle()
            return action()

        return self._in_turn(check_and_act)

    def sleep(self, action: Callable[[], None], why: str) -> None:
        """Run ``action`` between two steps and refuse requests from then on, saying ``why``."""

        def rest() -> None:
            action()
            self._asleep = why

        self.between_steps(rest)

    def wake(self, action: Callable[[], None]) -> None:
        """Run ``action`` and serve requests again; no effect where nobody sleeps."""

        def rouse() -> None:
            if self._asleep:
                action()
                self._asleep = ""

        self._in_turn(rouse)

    def try_between_steps(self, action: Callable[[], object]) -> None:
        """Run ``action`` if no step runs now; in a thread that may hold another engine's lock."""
        if self._closed or self._stepping == threading.get_ident():
            return
        if self._step_lock.acquire(blocking=False):
            try:
                with self._current():
                    self._engine.settle()
                    action()
            finally:
                self._step_lock.release()

    def close(self) -> None:
        """Let the step in progress end, fail what is waiting, give everything back.

        A step that waits for worker processes gets five seconds; then they are killed.
        """
        if os.getpid() != self._owner:
            return  # a forked child shares the memory but owns neither threads nor workers
        with self._lock:
            self._closed = True
            self._wakeups.notify_all()
        if self._stepping == threading.get_ident():
            return  # the step around us closes the engine when it ends
        if not self._step_lock.acquire(timeout=_PATIENCE_S):
            self._engine.break_off()
            self._step_lock.acquire()
        try:
            with self._current():
                self._end()
        finally:
            self._step_lock.release()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _end(self) -> None:
        with ExitStack() as all_of_it:  # whatever raises on the way
            closed = EngineClosedError("the LLM was closed while this request was running")
            all_of_it.callback(self._fail_all, closed)
            if self.lease is not None:
                all_of_it.callback(self.lease.close)
            self._engine.close()
