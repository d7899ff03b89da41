"""One rank, in the calling process: no process, no thread, no socket."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from sdk.api.errors import EngineClosedError
from sdk.engine.executor import Pending
from sdk.engine.plan import StepPlan, StepResult
from sdk.engine.stage_times import StageTimes
from sdk.models.parallel import Mesh


class Runner(Protocol):
    """One rank, as executors see it: :class:`sdk.engine.rank.runner.ModelRunner`, or a fake."""

    @property
    def native_seconds(self) -> float:
        """Seconds spent in native calls so far."""

    def entered(self) -> AbstractContextManager[object]:
        """A context for every call of the rank and of what it has launched: on a GPU its device and
        its stream are the thread's current ones."""

    def launch(self, plan: StepPlan) -> Pending:
        """Begin one step."""

    def close(self) -> None:
        """Free everything."""


RunnerT = TypeVar("RunnerT", bound=Runner)
#: Builds the runner of one rank from a config and its mesh; ``ModelRunner`` itself is a factory.
RankFactory = Callable[[Any, Mesh], RunnerT]


class LocalExecutor(Generic[RunnerT]):
    """Runs every step in the thread that calls :meth:`launch`.

    :param factory: builds the runner, in :meth:`start`.
    :param config: the factory's first argument.
    """

    stages = 1
    stage_times: StageTimes | None = None
    warning: str | None = None

    def __init__(self, factory: RankFactory[RunnerT], config: Any) -> None:
        self._factory = factory
        self._config = config
        self._runner: RunnerT | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._launched: deque[Pending] = deque()
        self._working = False  # in launch() or result()
        self._owner = os.getpid()

    @property
    def runner(self) -> RunnerT:
        """The runner. :raises EngineClosedError: before :meth:`start` or after :meth:`close`."""
        if self._runner is None:
            raise EngineClosedError("the executor is not running")
        return self._runner

    def start(self) -> None:
        """Build the runner. Raises what the factory raises."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the executor was closed")
            self._runner = self._factory(self._config, Mesh())

    def launch(self, plan: StepPlan) -> None:
        """See :class:`sdk.engine.executor.Executor`. Raises what the runner raises.

        Uses a flag instead of the lock: taking and releasing that costs 6 us right after a step.
        """
        try:
            self._working = True  # before it looks for the runner: see close()
            runner = self.runner
            with runner.entered():
                self._launched.append(runner.launch(plan))
        except BaseException:
            self._launched.clear()
            raise
        finally:
            self._working = False

    def result(self) -> StepResult:
        """See :class:`sdk.engine.executor.Executor`. Raises what the runner raises."""
        try:
            self._working = True
            if not self._launched:
                raise EngineClosedError("no step is in flight: the executor is not running")
            with self.runner.entered():
                return self._launched.popleft().result()
        except BaseException:
            self._launched.clear()
            raise
        finally:
            self._working = False

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """See :class:`sdk.engine.executor.Executor`."""
        with self._lock, self.runner.entered():
            return [function(self.runner, *args)]

    @property
    def native_seconds(self) -> float:
        """See :class:`sdk.engine.executor.Executor`. 0 while it is stopped."""
        return 0.0 if self._runner is None else self._runner.native_seconds

    def break_off(self) -> None:
        """See :class:`sdk.engine.executor.Executor`. A step here waits for no other process."""

    def stop(self) -> None:
        """Close the runner; :meth:`start` builds a new one."""
        with self._lock:
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.close()

    def close(self) -> None:
        """Close the runner, after the step in progress. Idempotent; no effect in a forked child."""
        if os.getpid() != self._owner:
            return  # the runner's threads and locks exist only in the parent
        with self._lock:
            self._closed = True
            runner, self._runner = self._runner, None
            while self._working:  # a step may already use the runner
                time.sleep(0.001)
            self._launched.clear()
            if runner is not None:
                runner.close()
