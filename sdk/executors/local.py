"""One rank, in the calling process: no process, no thread, no socket."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from sdk.engine.plan import StepPlan, StepResult
from sdk.errors import EngineClosedError
from sdk.models.parallel import Mesh


class Runner(Protocol):
    """One rank, as executors see it; :class:`sdk.engine.runner.ModelRunner` is the real one."""

    native_seconds: float

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step."""

    def execute_again(self, plan: StepPlan, tokens: list[int]) -> StepResult | list[int]:
        """Run the rows of the last step once more."""

    def close(self) -> None:
        """Give everything back."""


RunnerT = TypeVar("RunnerT", bound=Runner)
#: Builds the runner of one rank from a config and the rank's place: ``ModelRunner`` itself is one.
RankFactory = Callable[[Any, Mesh], RunnerT]


class LocalExecutor(Generic[RunnerT]):
    """Runs every step in the thread that calls :meth:`execute`.

    :param factory: builds the runner, in :meth:`start`.
    :param config: the factory's first argument.
    """

    def __init__(self, factory: RankFactory[RunnerT], config: Any) -> None:
        self._factory = factory
        self._config = config
        self._runner: RunnerT | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._again = False  # whether execute_again() is at work
        self._owner = os.getpid()

    @property
    def runner(self) -> RunnerT:
        """The runner. :raises EngineClosedError: before :meth:`start` and after :meth:`close`."""
        if self._runner is None:
            raise EngineClosedError("the executor is not running")
        return self._runner

    def start(self) -> None:
        """Build the runner; what the factory raises is raised on."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the executor was closed")
            self._runner = self._factory(self._config, Mesh())

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; what the runner raises is raised on."""
        with self._lock:
            return self.runner.execute(plan)

    def execute_again(self, plan: StepPlan, tokens: list[int]) -> StepResult | list[int]:
        """Run the rows of the last step once more, on the tokens they sampled.

        A flag in place of the lock: taking and giving that back costs 6 us right after a step.
        """
        try:
            self._again = True  # before it looks for the runner: see close()
            return self.runner.execute_again(plan, tokens)
        finally:
            self._again = False

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """See :class:`sdk.executors.base.Executor`."""
        with self._lock:
            return [function(self.runner, *args)]

    @property
    def native_seconds(self) -> float:
        """See :class:`sdk.executors.base.Executor`."""
        return self.runner.native_seconds

    def break_off(self) -> None:
        """See :class:`sdk.executors.base.Executor`: a step here waits for nobody."""

    def stop(self) -> None:
        """Close the runner; :meth:`start` builds it anew."""
        with self._lock:
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.close()

    def close(self) -> None:
        """Close the runner, after the step in progress. Idempotent; no effect in a forked child."""
        if os.getpid() != self._owner:
            return  # the runner's threads and locks stayed with the parent
        with self._lock:
            self._closed = True
            runner, self._runner = self._runner, None
            while self._again:  # it may have found the runner
                time.sleep(0.001)
            if runner is not None:
                runner.close()
