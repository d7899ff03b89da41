"""Where jobs go, and where their outputs come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from sdk.api.outputs import Estimate
from sdk.api.params import SamplingParams
from sdk.engine.engine import Output
from sdk.engine.executor import Executor
from sdk.engine.job import Job
from sdk.requests.driving.wakeups import LoopInbox
from sdk.requests.prompts.reader import Prompt


class OutputSink(Protocol):
    """Receives the outputs of requests. The thread that steps calls it: it must return at once."""

    def deliver(self, output: Output) -> bool:
        """Take one output; ``False`` means nobody reads any more, and aborts the request."""

    def fail(self, request_id: str, error: Exception) -> None:
        """The request has ended without a final output."""


class JobDriver(Protocol):
    """Runs jobs, for callers on any thread and any event loop.

    :class:`sdk.requests.driving.driver.Driver` for one engine, or
    :class:`sdk.cluster.replicas.replica_set.ReplicaSet`.
    """

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def loop_inbox(self) -> LoopInbox:
        """Where outputs for the running event loop go."""

    def check_usable(self, *, asleep: bool = False) -> None:
        """:raises EngineClosedError: after ``close`` or in a forked child.
        :raises EngineDeadError: after a failed step.
        :raises EngineAsleepError: while it sleeps, unless ``asleep`` allows that."""

    def submit(
        self, jobs: Sequence[Job], sink: OutputSink, *, run: bool = True, goes_on: bool = False
    ) -> None:
        """Add requests whose outputs go to ``sink``. ``run=False``: the caller does the stepping.
        ``goes_on``: they belong to a call that was accepted, so the queue is not full for them.
        """

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; unknown and finished ids are ignored."""

    def take_aborts(self) -> None:
        """Obey :meth:`abort` at once if nobody steps; waits for nothing."""

    def run(self, request_ids: Iterable[str]) -> None:
        """Finish submitted requests without the caller's stepping."""

    def step(self) -> Sequence[Output]:
        """Run one step, deliver its outputs and return them."""

    def pump(self, seconds: float) -> None:
        """Run steps for about ``seconds``."""

    def wrap_executor(self, wrap: Callable[[Executor], Executor]) -> None:
        """Run the next steps on ``wrap(executor)``: how sdk.testing injects faults."""

    def set_tenant_weight(self, tenant: str | None, weight: float) -> None:
        """See :meth:`sdk.LLM.set_tenant_weight`."""

    def estimate(self, prompt: Prompt, params: SamplingParams, priority: int | None) -> Estimate:
        """See :meth:`sdk.LLM.estimate`."""

    def close(self) -> None:
        """End all requests and give everything back. Idempotent, from any thread."""
