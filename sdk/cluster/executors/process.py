"""Ranks in processes: rank 0 here, every other rank in a process of its own.

These are children (:class:`Children`), processes on other hosts
(:mod:`sdk.cluster.executors.remote`), or actors of Ray (ray_ranks.py).

In one step every worker gets the plan, all ranks run it and synchronize in the exchanges of their
models, rank 0 produces the result, and the workers' answers end the step.

Without stages all ranks run it at the same time, so they are never more than one step apart. Stages
run it one after the other. The earlier ones get a plan when it is launched, and run it while the
last one is still busy with the plan before. The ranks of the last stage get it when that is done:
until then they would not read it, and a large message would wait for them.

Any failure of one rank in a step ends all ranks: the others would wait for it in their next
collective. The kernel closes a dead worker's connections, so rank 0's collective (or its wait for
the answer) fails at once. A worker that is alive but stuck is given up after ``collective_s``.

The children are started with ``subprocess``, not ``multiprocessing``, so the host's main script is
not imported again and needs no ``__main__`` guard.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, Protocol

from sdk.api.errors import EngineClosedError, EngineDeadError
from sdk.api.params import SamplingParams
from sdk.cluster.executors.children import ChildLost, Children
from sdk.cluster.executors.grid import Grid
from sdk.cluster.executors.groups import transport
from sdk.cluster.executors.nccl import Cards
from sdk.cluster.executors.worker import WorkerStart
from sdk.engine.executor import RankCall
from sdk.engine.plan import StepPlan, StepResult
from sdk.engine.stage_times import StageTimes
from sdk.executors.local import RankFactory, RunnerT
from sdk.kernels.errors import CollectiveError
from sdk.models.parallel import Mesh
from sdk.sampling.resolved import ResolvedParams

logger = logging.getLogger("sdk")

_LOST = (CollectiveError, ChildLost)


class Workers(Protocol):
    """The ranks other than 0 of one executor: see :class:`Children`, which says what is raised."""

    def bring_up(self, start: WorkerStart, startup_s: float, collective_s: float) -> Mesh: ...
    def pack(self, message: object) -> Any: ...
    def send(self, message: Any, limit_s: float, ranks: range | None = None) -> None: ...
    def expect(self, kind: str, limit_s: float) -> list[tuple[Any, ...]]: ...
    def diagnose(self, error: BaseException) -> EngineDeadError: ...
    def remove_folder(self) -> None: ...
    def watch(self, works: Callable[[], int]) -> None: ...
    def stop(self, patience_s: float = 5.0) -> None: ...


class _Call:
    """The call of an executor that holds its lock. The thread that watches the workers has it, so
    it does not refer to the executor, which may be dropped."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.number = 0

    def in_progress(self) -> int:
        """Its number; 0: there is none."""
        return self.number if self._lock.locked() else 0


class ProcessExecutor(Generic[RunnerT]):
    """Runs every step on ``stages`` stages of ``size`` ranks.

    Rank 0, the first rank of the last stage, runs in the calling thread, the others in children.

    :param factory: builds a rank's runner. Pickled by reference: a function or class that the
        children can import.
    :param config: its first argument, in every rank; pickled.
    :param size: the number of ranks of each stage.
    :param stages: the number of stages; as many steps may be in flight.
    :param sent_per_step: how many tensors a stage sends on in each step.
    :param engines: how many executors like this one compute on this machine.
    :param num_threads: torch's threads in each child.
    :param own_factory: builds rank 0's runner instead of ``factory``; never pickled.
    :param startup_s: seconds that a child may take to import and connect, and to finish its runner
        after rank 0 has finished (plus three times what rank 0 took).
    :param collective_s: seconds that rank 0 waits for a rank that is alive.
    :param workers: makes what starts the other ranks and speaks to them: child processes (the
        default), ranks on other hosts, actors of Ray.
    :param cards: the GPUs of the ranks, which are child processes (default: ranks are on CPUs).
    :param warning: what the user of these ranks should know.
    """

    def __init__(
        self,
        factory: RankFactory[RunnerT],
        config: Any,
        size: int,
        *,
        stages: int = 1,
        sent_per_step: int = 1,
        engines: int = 1,
        num_threads: int = 1,
        own_factory: RankFactory[RunnerT] | None = None,
        startup_s: float = 120.0,
        collective_s: float = 300.0,
        workers: Callable[[], Workers] = Children,
        cards: Cards | None = None,
        warning: str | None = None,
    ) -> None:
        self._factory, self._own_factory = factory, own_factory or factory
        self._config = config
        self._grid = Grid(size, stages, engines, cards, sent_per_step)
        self._mesh = Mesh()
        self.warning = warning
        self.stage_times = StageTimes(stages)
        self._num_threads = num_threads
        self._startup_s, self._collective_s = startup_s, collective_s
        self._runner: RunnerT | None = None
        #: The steps in flight, each with its message to the workers.
        self._launched: deque[tuple[StepPlan, bytes]] = deque()
        #: Tokens sampled in the last steps, for the ranks that do not sample.
        self._sampled: list[tuple[str, tuple[int, ...]]] = []
        self._failure: str | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._call = _Call(self._lock)
        self._owner = os.getpid()
        self._workers = workers
        self._children = workers()
        # also at interpreter exit, and in a forked child
        self._finalizer = weakref.finalize(self, self._children.stop, 1.0)

    @property
    def runner(self) -> RunnerT:
        """Rank 0's. :raises EngineClosedError: before :meth:`start` or after :meth:`close`."""
        if self._runner is None:
            raise EngineClosedError("the executor is not running")
        return self._runner

    @property
    def stages(self) -> int:
        """The number of stages, and of steps that may be in flight."""
        return self._grid.stages

    def start(self) -> None:
        """Start the children, connect, build all ranks.

        Raises what rank 0's factory raises.

        :raises EngineDeadError: a child failed; with its error and its last messages.
        """
        self._check_owner()
        with self._lock:
            self._check()
            try:
                self._start()
            except BaseException as error:
                raised = self._end(error)
                self._failure = f"the executor did not start: {raised}"
                if raised is error:
                    raise
                raise raised from error

    def _start(self) -> None:
        start = WorkerStart(
            0,
            self._grid,
            "",
            transport(),
            self._num_threads,
            self._startup_s,
            self._factory,
            self._config,
        )
        self._mesh = self._children.bring_up(start, self._startup_s, self._collective_s)
        begin = time.monotonic()
        self._runner = self._own_factory(self._config, self._mesh)
        built_s = time.monotonic() - begin
        self._children.expect("ready", self._startup_s + 3 * built_s)
        if self._grid.cards is None:  # their backend looks into it
            self._children.remove_folder()
        self._children.watch(self._call.in_progress)

    def launch(self, plan: StepPlan) -> None:
        """Begin one step on the stages before the last one.

        What is raised because the plan cannot be packed ends no rank.

        :raises EngineDeadError: a rank failed in this step or an earlier one.
        :raises EngineClosedError: after :meth:`close`, even in the middle of the step.
        """
        self._check_owner()
        message = self._children.pack(_for_workers(plan, tuple(self._sampled)))
        with self._running():
            self._sampled = []
            grid = self._grid
            self._children.send(message, self._collective_s, range(grid.width, grid.size))
            self._launched.append((plan, message))
            self.stage_times.begin()

    def result(self) -> StepResult:
        """Run the last stage's part of the oldest step and wait for all ranks; rank 0's result.

        A KeyboardInterrupt in the middle of it also ends the ranks: call this on a thread that gets
        no interrupts. Raises as :meth:`launch` does.
        """
        with self._running():
            plan, message = self._launched.popleft()
            self._children.send(message, self._collective_s, range(self._grid.width))
            times, mesh = self.stage_times, self._mesh
            begin, waited = time.monotonic(), mesh.waited_seconds
            with self.runner.entered():
                result = self.runner.launch(plan).result()
            times.computing[-1] += time.monotonic() - begin - (mesh.waited_seconds - waited)
            answers = self._children.expect("done", self._collective_s)
            for rank, (_, unwritten, unencoded, seconds) in enumerate(answers, 1):
                if rank % self._grid.width == 0:  # the first rank of its stage
                    times.computing[self._grid.stage(rank)] += seconds
                if unwritten:  # a page is lost if any rank's part of it is
                    result = result._replace(unwritten={**unwritten, **result.unwritten})
                if unencoded:
                    result = result._replace(unencoded={**unencoded, **result.unencoded})
            times.end(len(self._launched))
            # a plan that was launched meanwhile may use an id again: for another request
            anew = {start.request_id for later, _ in self._launched for start in later.started}
            self._sampled += [
                (row.request_id, tuple(tokens))
                for row, tokens in zip(plan.rows, result.tokens, strict=False)
                if tokens and row.request_id not in anew
            ]
            return result

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Inside this context, any failure of a rank ends all of them."""
        self._check_owner()
        with self._lock:
            self._check()
            self._call.number += 1
            try:
                yield
            except BaseException as error:
                raised = self._end(error)
                final = isinstance(raised, EngineDeadError | EngineClosedError)
                if isinstance(raised, Exception) and not final:
                    raised = EngineDeadError(f"rank 0 failed: {type(error).__name__}: {error}")
                self._failure = f"a rank was lost in an earlier step: {raised}"
                if raised is error:
                    raise
                raise raised from error

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """See :class:`sdk.engine.executor.Executor`. Raises as :meth:`launch` does."""
        self._check_owner()
        call = self._children.pack(RankCall(function, args))
        with self._running():
            self._children.send(call, self._collective_s)
            with self.runner.entered():
                own = function(self.runner, *args)
            answers = self._children.expect("done", self._collective_s)
            return [own, *(answer for _, answer in answers)]

    @property
    def native_seconds(self) -> float:
        """See :class:`sdk.engine.executor.Executor`. 0 while it is stopped."""
        return 0.0 if self._runner is None else self._runner.native_seconds

    def _check_owner(self) -> None:
        # before the lock: a forked child may have inherited it locked
        if os.getpid() != self._owner:
            raise EngineClosedError(
                f"the executor belongs to process {self._owner}, not to this forked child"
            )

    def _check(self) -> None:
        if self._closed:
            raise EngineClosedError("the executor was closed")
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def _end(self, error: BaseException) -> BaseException:
        """Kill the children; returns the error to raise: a worker's, if that was the cause."""
        raised = error
        if self._closed and isinstance(error, (*_LOST, EngineDeadError)):
            raised = EngineClosedError("the executor was closed while it worked")
        elif isinstance(error, _LOST):
            raised = self._children.diagnose(error)
        self._children.stop(0.0)
        self._launched.clear()
        return raised

    def break_off(self) -> None:
        """Kill the children: the step in progress raises EngineClosedError."""
        self._closed = True
        self._children.stop(0.0)

    def stop(self) -> None:
        """End the children and close rank 0's runner; :meth:`start` starts them again."""
        self._check_owner()
        with self._lock:
            self._check()
            self._children.stop()
            runner, self._runner = self._runner, None
            self._mesh = Mesh()  # with its descriptors
            if runner is not None:
                runner.close()
            self._finalizer.detach()
            self._children = self._workers()
            self._finalizer = weakref.finalize(self, self._children.stop, 1.0)

    def close(self) -> None:
        """End the children and close rank 0's runner.

        A call in progress gets five seconds to finish, then its workers are killed and it raises;
        steps whose results were not collected are dropped. Idempotent; no effect in a forked child.
        """
        if os.getpid() != self._owner:
            return
        self._closed = True
        if not self._lock.acquire(timeout=5.0):
            self._children.stop(0.0)  # the step's next collective fails
            if not self._lock.acquire(timeout=10.0):
                logger.warning(
                    "close: rank 0 is still running its step; its memory is not freed yet"
                )
                return
        try:
            self._children.stop()
            runner, self._runner = self._runner, None
            self._mesh = Mesh()  # with its descriptors
            if runner is not None:
                runner.close()
            self._finalizer.detach()
        finally:
            self._lock.release()


def _for_workers(plan: StepPlan, sampled: tuple[tuple[str, tuple[int, ...]], ...]) -> StepPlan:
    """The plan with the sampled tokens, without sampling parameters: only rank 0 samples, and a
    logits processor need not be picklable. ``prompt_logprobs`` stays, because it determines which
    logits all ranks compute.
    """
    started = (
        start._replace(
            spec=replace(
                start.spec,
                params=SamplingParams(prompt_logprobs=start.spec.params.prompt_logprobs),
                resolved=ResolvedParams(),
            )
        )
        for start in plan.started
    )
    return plan._replace(started=tuple(started), sampled=sampled)
