"""The events of a simulation: requests arrive, steps end, replicas start, fail, become slow.

Each replica has a real :class:`~sdk.engine.scheduling.scheduler.Scheduler`, and a real
:class:`~sdk.cluster.replicas.routing.Router` chooses among them; both read the virtual clock. A
replica reports after each step, as a replica's process does, and reports arrive at once.

When a replica fails, the router is asked again for its requests. What they had generated was
delivered, so it becomes a part of the prompt, which another replica computes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sdk.api.errors import RequestError
from sdk.cluster.replicas.routing import Routed, Router, RoutingPolicy
from sdk.cluster.simulation.autoscaling import Autoscaling
from sdk.cluster.simulation.costs import StepCosts
from sdk.cluster.simulation.replica import SimulatedReplica, scheduler_config
from sdk.cluster.simulation.results import Results, percentile
from sdk.cluster.simulation.workload import SimulatedRequest, Workload
from sdk.engine.scheduling.request import Request
from sdk.metrics.slo import SLO

#: The progress is told after this many requests.
_TELL_EVERY = 1000


class Failure(NamedTuple):
    """A replica dies ``at`` a time and is back ``seconds`` later, empty; infinity: never."""

    replica: int
    at: float
    seconds: float


class Straggler(NamedTuple):
    """From a time on, the steps of a replica take ``factor`` times as long."""

    replica: int
    factor: float
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated, besides the requests.

    ``startup``: seconds until a replica that autoscaling adds is ready.

    :raises RequestError: a value is out of range.
    """

    replicas: int
    costs: StepCosts
    policy: RoutingPolicy = "state"
    failures: tuple[Failure, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    autoscaling: Autoscaling | None = None
    startup: float = 30.0
    slo: SLO = field(default_factory=lambda: SLO(ttft=1.0, tpot=0.1))

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise RequestError(f"replicas: expected at least 1, found {self.replicas}")
        if not self.startup >= 0:
            raise RequestError(f"startup: expected seconds of at least 0, found {self.startup}")
        for failure in self.failures:
            self._check("failure", failure.replica)
            if not (failure.at >= 0 and failure.seconds >= 0):
                raise RequestError(f"failure: expected seconds of at least 0, found {failure}")
        for straggler in self.stragglers:
            self._check("straggler", straggler.replica)
            if not (straggler.at >= 0 and straggler.factor > 0):
                raise RequestError(
                    f"straggler: expected a factor above 0 and seconds of at least 0, found "
                    f"{straggler}"
                )

    def _check(self, what: str, replica: int) -> None:
        if not 0 <= replica < self.replicas:
            raise RequestError(
                f"{what}: expected a replica from 0 to {self.replicas - 1}, found {replica}"
            )


class VirtualClock:
    """The time of a simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class _Unfinished:
    """A request, and what is left of it for the replica that has it: after a failure less than the
    whole. ``first_token`` and ``cached`` are from before a failure."""

    request: SimulatedRequest
    left: SimulatedRequest
    scheduled: Request | None = None
    first_token: float | None = None
    cached: int | None = None


class Simulation:
    """Runs a scenario once. Deterministic."""

    def __init__(self, scenario: Scenario, workload: Workload) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.router = Router(scenario.policy, self.clock)
        self.results = Results(scenario.slo)
        self.num_ended = 0
        self._workload = workload
        self._config = scheduler_config(scenario.costs)
        self._replicas: dict[int, SimulatedReplica] = {}
        self._started: dict[int, float] = {}
        self._closing: set[int] = set()
        self._slowdown: dict[int, float] = {}
        self._unfinished: dict[str, _Unfinished] = {}
        self._held: list[str] = []  # no replica is alive
        self._places: dict[int, int] = {}  # session -> replica of its last turn
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._num_events = 0
        self._num_coming = 0  # requests that will arrive
        self._num_starting = 0
        self._next_index = scenario.replicas
        self._recent: list[float] = []  # times to the first token since the last look
        self._arrivals = workload.arrivals()

    def run(self, progress: Callable[[int], None] | None = None) -> Results:
        """Run until all requests have ended. ``progress`` gets the number of those that have, now
        and then.

        :raises RequestError: requests are left, and no replica will run them.
        """
        scenario = self.scenario
        for index in range(scenario.replicas):
            self._join(index)
        for failure in scenario.failures:
            self._at(failure.at, self._fail, failure)
        for straggler in scenario.stragglers:
            self._at(straggler.at, self._slow, straggler)
        if scenario.autoscaling is not None:
            self._at(scenario.autoscaling.every, self._scale, scenario.autoscaling)
        self._fetch_arrival()
        events, clock, told = self._events, self.clock, 0
        while events and (self._num_coming or self._unfinished):
            clock.now, _, handler, what = heapq.heappop(events)
            handler(what)
            if progress is not None and self.num_ended >= told + _TELL_EVERY:
                progress(told := self.num_ended)
        if self._unfinished:
            raise RequestError(
                f"{len(self._unfinished)} requests are left and no replica is alive; let a replica "
                "restart"
            )
        for index in list(self._replicas):
            self._count(index)
        self.results.seconds = clock.now
        return self.results

    def _at(self, time: float, handler: Callable[[Any], None], what: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, handler, what))

    # ---- requests --------------------------------------------------------------------------------

    def _fetch_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is not None:
            self._num_coming += 1
            self._at(request.arrival, self._first_turn, request)

    def _first_turn(self, request: SimulatedRequest) -> None:
        self._arrive(request)
        self._fetch_arrival()

    def _arrive(self, request: SimulatedRequest) -> None:
        self._num_coming -= 1
        name = str(request.number)
        self._unfinished[name] = _Unfinished(request, request)
        self._send(name)

    def _send(self, name: str) -> None:
        """Ask the router for a replica, and give it the request."""
        if not self.router.alive:
            self._held.append(name)
            return
        known = self._unfinished[name]
        request, left = known.request, known.left
        tokens = list(left.prompt)
        routed = Routed(name, tokens, max_tokens=left.max_tokens, arrival=request.arrival)
        index = self.router.choose(routed)
        if request.turn and self._places.get(request.session, index) != index:
            self.results.num_moved_turns += 1
        self._places[request.session] = index
        replica = self._replicas[index]
        known.scheduled = replica.add(name, tokens, left)
        if not replica.busy:
            self._begin_step(replica)

    def _ended(self, ended: Request) -> None:
        known = self._unfinished.pop(ended.request_id)
        self.router.ended(ended.request_id)
        request, now = known.request, self.clock.now
        self._note_first_token(known)
        assert known.first_token is not None
        done = len(known.left.prompt) - len(request.prompt) + ended.num_output_tokens
        ttft = known.first_token - request.arrival
        e2e = now - request.arrival
        self.results.ended(request.kind, ttft, e2e, len(request.prompt), known.cached or 0, done)
        self._recent.append(ttft)
        self.num_ended += 1
        following = self._workload.next_turn(request, now)
        if following is None:
            self._places.pop(request.session, None)
        else:
            self._num_coming += 1
            self._at(following.arrival, self._arrive, following)

    @staticmethod
    def _note_first_token(known: _Unfinished) -> None:
        """Keep what the scheduler knows, unless it was known before."""
        scheduled = known.scheduled
        if scheduled is not None:
            if known.first_token is None:
                known.first_token = scheduled.first_token_ts
            if known.cached is None:
                known.cached = scheduled.num_cached

    # ---- steps -----------------------------------------------------------------------------------

    def _begin_step(self, replica: SimulatedReplica) -> None:
        seconds = replica.begin()
        if seconds is not None:
            self._at(self.clock.now + seconds, self._end_step, replica)
        elif replica.index in self._closing:
            self._leave(replica.index)

    def _end_step(self, replica: SimulatedReplica) -> None:
        if self._replicas.get(replica.index) is not replica:
            return  # it died while the step ran
        updates = replica.end()
        report = replica.report()
        if report is not None:
            self.router.report(replica.index, report)
        for update in updates:
            self._ended(update.request)
        self._begin_step(replica)

    # ---- replicas --------------------------------------------------------------------------------

    def _join(self, index: int) -> None:
        """A replica is ready."""
        scenario = self.scenario
        replica = SimulatedReplica(index, self._config, scenario.costs, self.clock)
        replica.executor.slowdown = self._slowdown.get(index, 1.0)
        self._replicas[index] = replica
        self._started[index] = self.clock.now
        self.router.joined(index)
        report = replica.report()
        assert report is not None  # the first one
        self.router.report(index, report)
        self._count_replicas()
        held, self._held = self._held, []
        for name in held:
            self._send(name)

    def _leave(self, index: int) -> list[str]:
        """A replica is gone; its unfinished requests."""
        self._count(index)
        self._closing.discard(index)
        lost = self.router.lost(index)
        self._count_replicas()
        return lost

    def _count(self, index: int) -> None:
        """Add what a replica did to the results. It takes no part any more."""
        replica, results = self._replicas.pop(index), self.results
        results.replica_seconds += self.clock.now - self._started.pop(index)
        results.busy_seconds += replica.busy_seconds
        results.num_steps += replica.scheduler.num_steps
        results.num_preemptions += replica.scheduler.queues.num_preemptions
        gaps, more = results.gaps, replica.scheduler.recorder.inter_token_latency
        gaps.counts = [a + b for a, b in zip(gaps.counts, more.counts, strict=True)]
        gaps.sum += more.sum

    def _count_replicas(self) -> None:
        changes = self.results.replicas
        if changes and changes[-1][0] == self.clock.now:
            changes.pop()
        changes.append((self.clock.now, len(self._replicas)))

    def _fail(self, failure: Failure) -> None:
        if failure.replica not in self._replicas:
            return
        lost = self._leave(failure.replica)
        if failure.seconds < math.inf:
            self._at(self.clock.now + failure.seconds, self._restart, failure.replica)
        self.results.num_rerouted += len(lost)
        for name in lost:
            known = self._unfinished[name]
            self._note_first_token(known)
            known.left = _rest(known)
            self._send(name)

    def _restart(self, index: int) -> None:
        if index not in self._replicas:
            self._join(index)

    def _slow(self, straggler: Straggler) -> None:
        self._slowdown[straggler.replica] = straggler.factor
        replica = self._replicas.get(straggler.replica)
        if replica is not None:
            replica.executor.slowdown = straggler.factor

    def _scale(self, policy: Autoscaling) -> None:
        """Look whether there should be more replicas, or fewer."""
        now = self.clock.now
        waits = [
            now - known.request.arrival
            for known in self._unfinished.values()
            if known.first_token is None
            and (known.scheduled is None or known.scheduled.first_token_ts is None)
        ]
        active = len(self._replicas) - len(self._closing) + self._num_starting
        if policy.by == "queue":
            value = len(waits) / max(active, 1)
        else:
            value = percentile([*self._recent, *waits], 90) if self._recent or waits else 0.0
        self._recent = []
        wanted = policy.wanted(active, value)
        for _ in range(wanted - active):
            self._num_starting += 1
            self._at(now + self.scenario.startup, self._add_replica, self._next_index)
            self._next_index += 1
        for _ in range(min(active - wanted, len(self.router.replicas) - 1)):
            self._close_replica()
        self._at(now + policy.every, self._scale, policy)

    def _add_replica(self, index: int) -> None:
        self._num_starting -= 1
        self._join(index)

    def _close_replica(self) -> None:
        """The replica with the fewest requests ends when it has none left."""
        router = self.router
        index = min(router.replicas, key=lambda one: (len(router.unfinished(one)), -one))
        router.closing(index)
        self._closing.add(index)
        if not self._replicas[index].busy:
            self._leave(index)


def _rest(known: _Unfinished) -> SimulatedRequest:
    """What another replica must do: the tokens generated so far are a part of the prompt."""
    scheduled, left = known.scheduled, known.left
    generated = [] if scheduled is None else scheduled.output_token_ids
    return replace(
        left,
        prompt=[*left.prompt, *generated],
        answer=left.answer[len(generated) :],
        max_tokens=left.max_tokens - len(generated),
    )
