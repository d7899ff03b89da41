"""How long callers wait: how many requests may be unfinished (``max_waiting``), and how long a
request would take if it came now (``LLM.estimate``).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Container, Sequence
from typing import NamedTuple

from sdk.api.errors import QueueFullError, RequestError
from sdk.api.outputs import Estimate
from sdk.api.params import SamplingParams
from sdk.api.scheduling_policy import SchedulingPolicy
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling.forecast import Work, forecast
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.waiting import WaitingRequests
from sdk.quant.safe_repr import safe_repr
from sdk.requests.driving.job_driver import OutputSink
from sdk.requests.driving.step_sizes import mixed_step_tokens
from sdk.requests.prompts.reader import Prompt

#: The rate at which requests end is that of the last this many.
_LAST_ENDS = 64
#: Seconds that are expected at least, and while no request has ended.
_LEAST_WAIT_S = 0.05
_FIRST_WAIT_S = 1.0


def check_new(jobs: Sequence[Job], unfinished: Container[str]) -> None:
    """Check the ids of new requests. :raises RequestError: one is in use."""
    for job in jobs:
        if job.request_id in unfinished:
            raise RequestError(
                f"request_id: {safe_repr(job.request_id)} belongs to an unfinished request; use "
                "another id"
            )


class Place(NamedTuple):
    """An unfinished request: where its outputs go, and the slots that it takes while it runs; none
    once it is being aborted."""

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
        if place.slots:  # those that were aborted say nothing about speed
            self._ends.append((time.monotonic(), place.slots))


#: The length of an answer while none has ended.
_FIRST_ANSWER = 256
#: Shares of the answers that are shorter than what the ends of the range take for the others.
_QUARTILES = 0.25, 0.75
#: Predicted times of a step are wrong by the mean error that was measured, and a busy machine
#: changes all of them together; so the range is this many times as wide.
_ERRORS = 2.0
_Length = Callable[[Request], float]


def estimate(
    scheduler: Scheduler, prompt: Prompt, params: SamplingParams, priority: int | None
) -> Estimate:
    """See :meth:`sdk.LLM.estimate`. Reads the scheduler's state while a step may change it."""
    queues, times = scheduler.queues, scheduler.times
    job = Job(
        SequenceSpec("estimate", params, images=prompt.images),
        prompt.token_ids,
        priority=priority,
        cache_salt=prompt.cache_salt,
        arrival_time=queues.clock(),
    )
    request = Request(job)
    cached = scheduler.prefixes.cached_tokens(request)
    running, waiting = list(queues.running), queues.waiting.snapshot()
    policy = queues.policy.forecast()
    order = float(queues.policy.order(request))
    request.order = order, request.arrival_time, queues.num_added + 1
    request.queue = queues.policy.queue(request)
    if policy is not None:
        policy.added(request)
    first_victim = _overtaken(scheduler, policy or queues.policy, request, running)
    ahead, behind = _in_order(policy or queues.policy, waiting, request, charge=policy is not None)
    counts = len(prompt.token_ids), cached, len(ahead)
    tower: float | None = 0.0
    if scheduler.images is not None:
        tower = scheduler.images.left_seconds([*running, *ahead], request, cached)
    if not times.known or tower is None:
        return Estimate(None, None, None, None, *counts)

    def look(share: float | None) -> tuple[float, float]:
        length = _lengths(scheduler, share)
        own = _work(request, length)
        own.prompt, own.context = own.prompt - cached, cached
        first, finish = forecast(
            times,
            [_work(one, length) for one in running if one is not first_victim],
            [_work(one, length) for one in ahead],
            own,
            [_work(one, length) for one in behind],
            max_num_seqs=scheduler.config.max_num_seqs,
            step_tokens=mixed_step_tokens(scheduler),
        )
        return first + tower, finish + tower

    step = times.decode(len(running)) if running else 0.0  # one may be in progress
    wrong = 1 + _ERRORS * times.error
    first, finish = (value + step / 2 for value in look(None))
    low, high = look(_QUARTILES[0]), look(_QUARTILES[1])
    # requests that come later make steps as long as the last ones were
    length = _lengths(scheduler, _QUARTILES[1])(request)
    slow = high[0] + length * times.step / times.tokens_per_row
    return Estimate(
        first,
        finish,
        (min(low[0], first) / wrong, max(high[0] + step, first) * wrong),
        (min(low[1], finish) / wrong, max(high[1] + step, finish, slow) * wrong),
        *counts,
    )


def _overtaken(
    scheduler: Scheduler, policy: SchedulingPolicy, request: Request, running: Sequence[Request]
) -> Request | None:
    """The running request that would give its slot to this one."""
    slots = sum(len(one.sequences) for one in running) + len(request.sequences)
    if slots > scheduler.config.max_num_seqs and policy.preemptive:
        for one in reversed(running):
            if policy.overtakes(request, one):
                return one
    return None


def _in_order(
    policy: SchedulingPolicy, waiting: Sequence[Request], own: Request, *, charge: bool
) -> tuple[list[Request], list[Request]]:
    """The waiting requests that start before ``own``, and those after it. ``charge``: the tokens of
    each change the positions of the next."""
    queues = WaitingRequests(policy)
    for request in [*waiting, own]:
        queues.add(request)
    ahead: list[Request] = []
    order = queues.in_order(policy)
    for request in order:
        if request is own:
            break
        ahead.append(request)
        if charge:
            policy.started(request)
            policy.ran(request, request.num_prompt_tokens, _FIRST_ANSWER)
    known = set(ahead)
    return ahead, [one for one in waiting if one not in known]


def _lengths(scheduler: Scheduler, share: float | None) -> _Length:
    """How long answers become: from those that ended last, the mean or a quantile of those that
    are longer than an answer is by now."""
    ended = sorted(scheduler.queues.answer_lengths)
    most = scheduler.config.max_model_len

    def length(request: Request) -> float:
        if request.spec.kind != "generate":
            return 0
        allowed = most - request.num_prompt_tokens
        if request.params.max_tokens is not None:
            allowed = min(allowed, request.params.max_tokens)
        if request.params.ignore_eos and not request.params.stop_token_ids:
            return allowed
        longer = [one for one in ended if one > request.num_output_tokens]
        if not longer:
            expected = max(_FIRST_ANSWER, 2 * request.num_output_tokens) if not ended else allowed
            return min(expected, allowed)
        if share is not None:
            return min(longer[int(share * len(longer))], allowed)
        return sum(min(one, allowed) for one in longer) / len(longer)

    return length


def _work(request: Request, length: _Length) -> Work:
    left = request.num_tokens - request.num_computed
    generates = request.spec.kind == "generate"
    answer = max(length(request) - request.num_output_tokens, 1 if generates else 0)
    prompt = 0 if request.pages and left == 1 and generates else max(left, 1)
    return Work(prompt, request.num_computed, answer, len(request.sequences))
