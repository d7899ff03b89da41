"""One replica of a simulation: a real scheduler, whose steps take as long as the costs say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.cluster.replicas.report import ReplicaReport, Reporter
from sdk.cluster.simulation.costs import StepCosts
from sdk.cluster.simulation.executor import END, CostExecutor
from sdk.cluster.simulation.workload import SimulatedRequest
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling.queues import RequestUpdate
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.requests.driving.step_sizes import StepSizes


def scheduler_config(costs: StepCosts, policy: str = "fcfs") -> SchedulerConfig:
    """The limits of the engine that was measured."""
    return SchedulerConfig(
        num_pages=costs.num_pages,
        page_size=costs.page_size,
        max_model_len=costs.max_model_len,
        max_num_seqs=costs.max_num_seqs,
        max_num_batched_tokens=costs.max_num_batched_tokens,
        policy=policy,  # type: ignore[arg-type]
        eos_token_ids=frozenset({END}),
    )


class SimulatedReplica:
    """Runs steps as the engine's thread does (``Driver``), except that nothing waits."""

    def __init__(
        self, index: int, config: SchedulerConfig, costs: StepCosts, clock: Callable[[], float]
    ) -> None:
        self.index = index
        self.scheduler = Scheduler(config, clock)
        self.executor = CostExecutor(costs)
        self.busy = False  # a step runs
        self.busy_seconds = 0.0
        self._clock = clock
        self._sizes = StepSizes(self.scheduler)
        self._reporter = Reporter(self.scheduler)
        self._received = 0
        self._news = self._sized = False
        self._params: dict[int, SamplingParams] = {}

    def add(self, name: str, token_ids: Sequence[int], request: SimulatedRequest) -> Request:
        """A request has come, whose prompt is ``token_ids``."""
        self._received += 1
        self._news = True
        most = request.max_tokens
        if most not in self._params:
            final = RequestOutputKind.FINAL_ONLY  # nobody watches the tokens
            self._params[most] = SamplingParams(max_tokens=most, output_kind=final)
        spec = SequenceSpec(name, self._params[most])
        added = Request(Job(spec, tuple(token_ids), arrival_time=self._clock()))
        self.executor.answers[name] = request.answer
        self.scheduler.queues.add(added)
        return added

    def begin(self) -> float | None:
        """Begin a step; its seconds. ``None``: there is nothing to do."""
        scheduler = self.scheduler
        if not scheduler.queues.unfinished:
            self.busy = False
            return None
        self._sized = self._news or not scheduler.repeats
        self._news = False
        most = self._sizes.for_engine_thread() if self._sized else None
        plan = scheduler.plan(most)
        assert plan is not None  # it is only with another step in flight
        self.executor.launch(plan)
        self.busy = True
        self.busy_seconds += self.executor.seconds
        return self.executor.seconds

    def end(self) -> list[RequestUpdate]:
        """The step has ended; the requests that ended with it."""
        scheduler, seconds = self.scheduler, self.executor.seconds
        updates = scheduler.commit(self.executor.result())
        committer = scheduler.committer
        if committer.num_together:
            gaps = scheduler.recorder.inter_token_latency
            gaps.add(committer.interval, committer.num_together)
        if self._sized and seconds > 0:
            self._sizes.learn_from_engine_thread(scheduler.num_tokens, seconds)
        for update in updates:
            del self.executor.answers[update.request.request_id]
        return updates

    def report(self) -> ReplicaReport | None:
        """See :meth:`Reporter.report`."""
        return self._reporter.report(self._received)
