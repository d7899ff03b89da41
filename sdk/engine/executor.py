"""What the engine needs of whatever runs its steps: one rank here, or several elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from sdk.engine.plan import StepPlan, StepResult
from sdk.engine.stage_times import StageTimes


class RankCall(NamedTuple):
    """What a rank is to do besides steps: ``function(runner, *args)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for it; what it produced."""


class Executor(Protocol):
    """Runs steps on 1..N ranks. Calls come one at a time, from any thread."""

    @property
    def native_seconds(self) -> float:
        """How long rank 0 has been inside native calls so far."""

    def start(self) -> None:
        """Bring the ranks up (load the model, allocate the KV pages). Called once, first."""

    def launch(self, plan: StepPlan) -> None:
        """Begin one step. Earlier steps may still be in flight, as many as the ranks support.

        A rank applies a plan in this order:

        1. ``sampled``: requests take the tokens of earlier steps;
        2. ``copies``, one after the other; page tables follow the moves;
        3. ``new_pages``, for requests that the rank already knows;
        4. ``dropped``: those requests are forgotten;
        5. ``started``: new requests, each with its pages;
        6. ``rows`` run.

        So one plan may drop and start the same id. It may drop an id that a rank does not know
        (after an interrupted step), and it may hold nothing but ``dropped``. Page 0 belongs to no
        request: padding may point at it.

        If this method or :meth:`result` raises, all steps in flight are given up. If it raises an
        ``Exception``, the ranks are lost and the engine fails every request with it. A failure of
        one request (NaN, a user's callback) goes into ``StepResult.errors`` instead.
        """

    def result(self) -> StepResult:
        """Wait for the oldest step in flight: what it produced, with its ``step_id``."""

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(runner, *args)`` on every rank, between two steps; the results by rank.

        Function and arguments must be picklable; what is raised because they are not ends no rank.
        Any other exception means that the ranks are lost.
        """

    def break_off(self) -> None:
        """Have a step that waits for other processes fail, from another thread; :meth:`close` is
        next. No effect where there are none.
        """

    def stop(self) -> None:
        """Give everything back until :meth:`start` is called again; between two steps."""

    def close(self) -> None:
        """Give everything back; idempotent, also after a failure or a ``start`` that failed."""


RunnerT_co = TypeVar("RunnerT_co", covariant=True)


class Ranks(Executor, Protocol[RunnerT_co]):
    """An executor as it is loaded: with rank 0 in this process."""

    @property
    def runner(self) -> RunnerT_co:
        """Rank 0's. :raises EngineClosedError: before :meth:`start` or after :meth:`close`."""

    @property
    def stages(self) -> int:
        """The number of stages, and of steps that may be in flight."""

    @property
    def stage_times(self) -> StageTimes | None:
        """How long each stage computes; ``None``: there is one stage."""

    @property
    def warning(self) -> str | None:
        """What the user of these ranks should know."""
