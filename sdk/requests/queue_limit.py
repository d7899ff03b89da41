"""How many requests may be unfinished at once: the option ``max_waiting``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple

from sdk.api.errors import QueueFullError
from sdk.api.scheduling_policy import SchedulingPolicy
from sdk.engine.job import Job
from sdk.requests.job import OutputSink

#: The rate at which requests end is that of the last so many.
_LAST_ENDS = 64
#: Seconds that are expected at least, and while no request has ended.
_LEAST_WAIT_S = 0.05
_FIRST_WAIT_S = 1.0


class Place(NamedTuple):
    """An unfinished request: where its outputs go, and the slots that it takes while it runs."""

    sink: OutputSink
    tenant: str | None
    slots: int
    since: float

    @classmethod
    def of(cls, job: Job, sink: OutputSink) -> Place:
        """The place of a new request."""
        params = job.params
        slots = 1
        if job.spec.kind == "generate":
            slots = params.num_answers * (1 if params.guidance_scale == 1.0 else 2)
        return cls(sink, params.tenant, slots, time.monotonic())


class QueueLimit:
    """At most ``max_num_seqs + max_waiting`` slots may be asked for by unfinished requests. So the
    limit is exact: it does not depend on how many of them the engine has started yet.

    A call is accepted or refused as a whole, and accepted if there is room for at least one slot:
    ``generate`` with 10,000 prompts works on an idle engine. A policy with weights reserves a share
    of the places for each tenant: one that uses less than its share is accepted although others
    have filled the queue. :class:`Driver` calls all methods with its lock.
    """

    def __init__(self, max_num_seqs: int, max_waiting: int, policy: SchedulingPolicy) -> None:
        self._limit = max_num_seqs + max_waiting
        self._what = f"max_num_seqs ({max_num_seqs}) + max_waiting ({max_waiting})"
        self._policy = policy
        self._ends: deque[tuple[float, int]] = deque(maxlen=_LAST_ENDS)  # time, slots

    def check(self, unfinished: Collection[Place], jobs: Sequence[Job]) -> None:
        """:raises QueueFullError: there is no room for ``jobs``, which are of one call."""
        if not unfinished:
            self._ends.clear()  # the time without requests says nothing about their speed
            return
        taken = sum(place.slots for place in unfinished)
        if taken < self._limit:
            return
        for tenant in {job.params.tenant for job in jobs}:
            own = sum(place.slots for place in unfinished if place.tenant == tenant)
            share = self._policy.share(tenant, {place.tenant for place in unfinished})
            if own + 1 > share * self._limit:
                wait = self._expected_wait(unfinished, taken)
                raise QueueFullError(
                    f"the queue is full: unfinished requests take {taken} slots, and at most "
                    f"{self._limit} are allowed, {self._what}; try again in about {wait:.2g} s",
                    wait,
                )

    def _expected_wait(self, unfinished: Collection[Place], taken: int) -> float:
        """Seconds until there is room, if requests go on ending as fast as the last ones did."""
        now = time.monotonic()
        if len(self._ends) < 2:
            return max(now - min(place.since for place in unfinished), _FIRST_WAIT_S)
        first = self._ends[0][0]
        ended = sum(slots for _, slots in self._ends) - self._ends[0][1]
        missing = taken - self._limit + 1
        return max(missing * (now - first) / ended, _LEAST_WAIT_S)

    def ended(self, place: Place) -> None:
        """A request has ended."""
        self._ends.append((time.monotonic(), place.slots))
