"""Scheduling policies: which request runs first, and which one gives up its place.

A policy is an object with the methods of :class:`SchedulingPolicy`, which is first come, first
served. ``LLM(scheduling_policy=)`` takes the name of a built-in policy, or an object: one for each
``LLM``. docs/scheduling.md explains the built-in policies and shows how to write one.

Waiting requests are in queues. Within a queue the order is fixed when a request arrives
(:meth:`~SchedulingPolicy.order`). Between queues it may change with every step
(:meth:`~SchedulingPolicy.position`). So a step needs the position of each queue, however many
requests wait.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

if TYPE_CHECKING:
    from sdk.engine.scheduling.request import Request

PolicyName = Literal["fcfs", "priority", "fair"]
#: The values of ``LLM(scheduling_policy=)`` that are names.
POLICIES: tuple[PolicyName, ...] = ("fcfs", "priority", "fair")
Position: TypeAlias = tuple[float, ...]

#: Seconds of waiting that count as much as one level of priority.
PRIORITY_AGING = 60.0
#: What a token of an answer costs, in tokens of a prompt: 1.9 on a CPU (SmolLM2 135M, 16 streams,
#: README.md); 2 in Sheng et al. 2024.
ANSWER_COST = 2.0
_WEIGHTS = 1e-3, 1e6


class SchedulingPolicy:
    """First come, first served. Subclasses override what differs.

    The engine calls a policy from one thread at a time. Methods must be quick and must not raise.
    A ``request`` has (among others) ``request_id``, ``tenant``, ``priority``, ``arrival_time`` in
    seconds, ``num_prompt_tokens``, ``num_tokens`` (with its answer so far) and ``params``.
    """

    #: Whether :meth:`overtakes` can be true. Otherwise waiting requests never preempt running ones.
    preemptive = False
    #: Whether :meth:`position` can change.
    dynamic = False

    def queue(self, request: Request) -> Hashable:
        """The queue of a request, such as its tenant."""
        return None

    def order(self, request: Request) -> float:
        """Smaller runs first in its queue; equal ones in the order of arrival. Asked once."""
        return 0.0

    def position(self, queue: Hashable) -> Position:
        """Of the first requests of several queues, the one of the smallest position runs first."""
        return ()

    def overtakes(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request goes before a running one: the tokens of a step go to its
        prompt first, and if slots or pages are missing, the running request is preempted.

        There must be no cycle: the preempted request must not overtake the other one at once.
        """
        return False

    def share(self, tenant: str | None, tenants: Iterable[str | None]) -> float:
        """The share of the places for unfinished requests that ``tenant`` may use even if
        ``max_waiting`` is reached. ``tenants``: those with unfinished requests. Any thread asks.
        """
        return 0.0

    def added(self, request: Request) -> None:
        """A request has arrived."""

    def started(self, request: Request) -> None:
        """A waiting request runs from now on."""

    def stopped(self, request: Request) -> None:
        """A running request has ended or was preempted."""

    def ended(self, request: Request) -> None:
        """A request has ended, waiting or running."""

    def ran(self, request: Request, prompt_tokens: int, answer_tokens: int) -> None:
        """Tokens of a request ran, or will in this step. Those found in the prefix cache do not
        count, nor do those that ran before a preemption. While a step repeats the one before, its
        tokens are reported later, together, but before the next use of :meth:`position`.
        """

    def forecast(self) -> SchedulingPolicy | None:
        """An independent copy, on which ``estimate`` calls :meth:`ran` to look ahead. ``None``:
        ``estimate`` takes positions as they are now.
        """
        return None


class PriorityPolicy(SchedulingPolicy):
    """A smaller ``priority`` runs first, and waiting ages: it counts as much as arriving
    ``aging`` seconds earlier for each level.

    So nothing starves: a request of priority p runs before all of priority q < p that arrive more
    than ``aging * (p - q)`` seconds after it. ``aging=inf``: priorities alone decide. The order of
    two requests never changes, because both age alike.
    """

    preemptive = True

    def __init__(self, aging: float = PRIORITY_AGING) -> None:
        self._aging = check_aging(aging)

    def order(self, request: Request) -> float:
        return _aged(request, self._aging)

    def overtakes(self, waiting: Request, running: Request) -> bool:
        return waiting.priority < running.priority and waiting.order < running.order


class FairPolicy(SchedulingPolicy):
    """Shares the engine between tenants by weight (virtual token counters, VTC: Sheng et al. 2024,
    "Fairness in Serving Large Language Models", arXiv 2401.00588).

    Each tenant has a counter: what its tokens cost (``ANSWER_COST`` for one of an answer, 1 for
    one of a prompt), divided by its weight. The tenant with the smallest counter is next. When a
    tenant without unfinished requests comes back, its counter is raised to the smallest one of the
    others, so that it cannot save up. Requests of a tenant run by priority, as with
    :class:`PriorityPolicy`, then by arrival.

    A waiting request overtakes a running one of another tenant that has used no less, if that
    tenant has more running requests for its weight than its own will have. So each preemption
    brings the slots closer to the weights, and two tenants never take a slot from each other in
    turn.
    """

    preemptive = dynamic = True

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        aging: float = PRIORITY_AGING,
    ) -> None:
        self._aging = check_aging(aging)
        self._weights: dict[Hashable, float] = {}
        for tenant, weight in (weights or {}).items():
            self.set_weight(tenant, weight)
        self._used: dict[Hashable, float] = {}  # the counters
        self._unfinished: dict[Hashable, int] = {}  # requests by tenant
        self._running: dict[Hashable, int] = {}
        self._floor = 0.0  # the counter of the last tenant that left

    def set_weight(self, tenant: str | None, weight: float) -> None:
        """From now on the tokens of a tenant count by this weight. Unknown tenants have 1."""
        if tenant is not None and (not isinstance(tenant, str) or not tenant):
            raise RequestError(f"tenant: expected a name or None, found {safe_repr(tenant)}")
        self._weights[tenant] = _check_weight(tenant, weight)

    def weight(self, tenant: Hashable) -> float:
        """The weight of a tenant."""
        return self._weights.get(tenant, 1.0)

    def queue(self, request: Request) -> Hashable:
        return request.tenant

    def order(self, request: Request) -> float:
        return _aged(request, self._aging)

    def position(self, queue: Hashable) -> Position:
        # of equal counters, such as one that was just raised, first the one with fewer slots
        used = self._used.get(queue, 0.0)
        return used, self._running.get(queue, 0) / self.weight(queue)

    def overtakes(self, waiting: Request, running: Request) -> bool:
        mine, other = waiting.tenant, running.tenant
        if mine == other or self._used[mine] > self._used.get(other, 0.0):
            return False
        slots = self._running.get(other, 0) * self.weight(mine)
        return slots > (self._running.get(mine, 0) + 1) * self.weight(other)

    def share(self, tenant: str | None, tenants: Iterable[str | None]) -> float:
        return self.weight(tenant) / sum(map(self.weight, {tenant, *tenants}))

    def added(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._unfinished:
            least = min((self._used[other] for other in self._unfinished), default=self._floor)
            self._forget(least)
            self._used[tenant] = max(self._used.get(tenant, 0.0), least)
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1

    def _forget(self, least: float) -> None:
        """Drop the counters that would be raised anyway, so that names do not pile up."""
        if len(self._used) > 2 * len(self._unfinished) + 64:
            kept = self._used.items()
            self._used = {t: used for t, used in kept if used > least or t in self._unfinished}

    def started(self, request: Request) -> None:
        self._running[request.tenant] = self._running.get(request.tenant, 0) + 1

    def stopped(self, request: Request) -> None:
        _decrease(self._running, request.tenant)

    def ended(self, request: Request) -> None:
        _decrease(self._unfinished, request.tenant)
        if not self._unfinished:
            self._floor = self._used[request.tenant]

    def ran(self, request: Request, prompt_tokens: int, answer_tokens: int) -> None:
        cost = prompt_tokens + ANSWER_COST * answer_tokens
        used = self._used.get(request.tenant, 0.0)
        self._used[request.tenant] = used + cost / self.weight(request.tenant)

    def forecast(self) -> FairPolicy:
        copy = FairPolicy(aging=self._aging)
        copy._weights = self._weights  # only read
        copy._used, copy._running = dict(self._used), dict(self._running)
        copy._unfinished, copy._floor = dict(self._unfinished), self._floor
        return copy


def make_policy(
    policy: PolicyName | SchedulingPolicy,
    weights: Mapping[str, float] | None = None,
    aging: float | None = None,
) -> SchedulingPolicy:
    """The policy of a name with these options, or the object itself."""
    if isinstance(policy, SchedulingPolicy):
        return policy
    aging = PRIORITY_AGING if aging is None else aging
    if policy == "fair":
        return FairPolicy(weights, aging=aging)
    return PriorityPolicy(aging) if policy == "priority" else SchedulingPolicy()


def check_aging(value: object) -> float:
    """:raises RequestError: the option ``priority_aging`` has a bad value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise RequestError(
            f"priority_aging: expected seconds above 0, or inf, found {safe_repr(value)}"
        )
    return float(value)


def _check_weight(tenant: str | None, weight: object) -> float:
    low, high = _WEIGHTS
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not low <= weight <= high:  # type: ignore[operator]
        raise RequestError(
            f"the weight of tenant {safe_repr(tenant)}: expected a number from {low:g} to "
            f"{high:g}, found {safe_repr(weight)}"
        )
    return float(weight)  # type: ignore[arg-type]


def _aged(request: Request, aging: float) -> float:
    if math.isinf(aging):
        return request.priority
    return request.arrival_time + request.priority * aging


def _decrease(counts: dict[Hashable, int], key: Hashable) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
