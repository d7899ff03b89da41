"""What a replica tells the router: its state between two steps, and the prefixes it holds."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from sdk.api.scheduling_policy import FairPolicy, PriorityPolicy
from sdk.engine.pages.page_pool import PageKey
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.requests.driving.step_sizes import mixed_step_tokens

#: Keys of pages in one report: 4096 take 150 KB. What is left comes with the next one.
_MOST_KEYS = 4096
#: While the same requests decode, one of this many steps is reported: only pages and answers grow.
_REPORT_EVERY = 64
#: Tokens of an answer while none has ended.
FIRST_ANSWER = 256


class TenantWork(NamedTuple):
    """Prompt tokens that a tenant's unfinished requests still have to compute, and its weight."""

    tenant: str | None
    tokens: int
    weight: float


class ReplicaReport(NamedTuple):
    """The state of a replica between two steps. Picklable; only numbers, names and digests.

    ``prompt_tokens`` and ``prompt_pairs`` are what is left of the prompts of all unfinished
    requests: tokens that are not cached, and the keys that these read, summed
    (``sdk/engine/scheduling/step_times.py``). Times are seconds, 0 while nothing was measured.
    """

    #: Plans made so far.
    step: int
    #: Requests that the replica has received from the router since it joined, however they ended.
    received: int
    num_waiting: int
    num_running: int
    #: Those of the running requests that need one token in the next step.
    num_decoding: int
    prompt_tokens: int
    prompt_pairs: float
    #: Expected tokens that are left of the answers of all unfinished requests.
    output_tokens: float
    #: The mean length of the answers that ended last; 0: none has ended.
    answer_tokens: float
    #: Pages that a new request could get now, free or only cached.
    free_pages: int
    total_pages: int
    page_size: int
    kv_type: str
    max_num_seqs: int
    #: The most tokens of a step with prompts.
    step_tokens: int
    seconds_per_token: float
    seconds_per_pair: float
    #: A step with one decoding request, and what each further one adds.
    decode_seconds: float
    decode_row_seconds: float
    #: With a fair policy: its tenants with unfinished requests.
    tenants: tuple[TenantWork, ...]
    #: With the policy "priority": ``prompt_tokens`` by priority.
    priorities: tuple[tuple[int, int], ...]
    #: Keys of the adapters that are in a slot.
    adapters: tuple[str, ...]
    #: Digests of pages that became known or unknown since the last report, each in one of the two.
    published: tuple[bytes, ...]
    evicted: tuple[bytes, ...]
    #: What earlier reports published is void: this is the first one, or the cache was reset.
    full: bool


class Reporter:
    """Makes the reports of one scheduler, in the process of its replica.

    It is the pool's ``on_known``. :meth:`report` is for the thread that runs the steps, between two
    of them. Another thread uses :meth:`look` and, once it has a report that it will send,
    :meth:`taken`.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._by_priority = isinstance(scheduler.queues.policy, PriorityPolicy)
        self._uncached: dict[str, int] = {}  # of waiting requests, by id
        #: The number of a list of keys, and its changes that were not taken yet: digest -> whether
        #: it is known now. Replaced as a whole, since two threads use it.
        self._keys: tuple[int, dict[bytes, bool]] = 0, {}
        self._taken_list = 0
        self._last: tuple[int, ...] = ()
        self._next_step = 0
        #: What taken() needs of the last look.
        self._looked: tuple[tuple[int, dict[bytes, bool]], tuple[int, ...]] = self._keys, ()
        self._begin_list(self._pool.digests)
        self._pool.on_known = self._on_known

    def _begin_list(self, digests: Iterable[bytes]) -> None:
        """Earlier reports are void."""
        self._keys = self._keys[0] + 1, dict.fromkeys(digests, True)

    def _on_known(self, key: PageKey | None, known: bool) -> None:
        if key is None:
            self._begin_list(())
        elif len(key.token_ids) == self._pool.page_size:
            changed = self._keys[1]
            changed[key.digest] = known
            if len(changed) > 2 * self._pool.num_pages + _MOST_KEYS:  # nobody asks
                self._begin_list(self._pool.digests)

    def report(self, received: int | None = None) -> ReplicaReport | None:
        """The state now; ``None`` if the router need not know what has changed.

        ``received``: see :class:`ReplicaReport`; by default all requests of the scheduler.
        """
        report = self.look(received)
        if report is not None:
            self.taken(report)
        return report

    def look(self, received: int | None = None) -> ReplicaReport | None:
        """:meth:`report`, without taking the report: the next one has all of it again. Another
        thread may call it while a step runs (``Driver.observe``).
        """
        scheduler = self._scheduler
        queues, committer, slots = scheduler.queues, scheduler.committer, scheduler.adapters
        step = scheduler.num_steps
        received = queues.num_added if received is None else received
        state = (
            received,
            queues.num_added,
            len(queues.unfinished),
            queues.num_preemptions,
            committer.num_prompt_tokens,
            len(queues.running),
            0 if slots is None else slots.num_loads,
        )
        keys = self._keys
        many = keys[0] != self._taken_list or len(keys[1]) >= _MOST_KEYS
        if state == self._last and step < self._next_step and not many:
            return None
        self._looked = keys, state
        return self._make(step, received, *keys)

    def taken(self, report: ReplicaReport) -> None:
        """The last report that :meth:`look` has returned will be sent."""
        (self._taken_list, changed), self._last = self._looked
        self._next_step = report.step + _REPORT_EVERY
        for known, digests in ((True, report.published), (False, report.evicted)):
            for digest in digests:
                now = changed.pop(digest, known)
                if now is not known:  # it has changed again since
                    changed.setdefault(digest, now)

    def _make(
        self, step: int, received: int, number: int, changed: dict[bytes, bool]
    ) -> ReplicaReport:
        scheduler, config = self._scheduler, self._scheduler.config
        queues, times = scheduler.queues, scheduler.times
        lengths = queues.answer_lengths
        answer = sum(lengths) / len(lengths) if lengths else 0.0
        tokens, pairs, output, decoding = 0, 0.0, 0.0, 0
        tenants: dict[str | None, int] | None = {} if queues.policy.dynamic else None
        priorities: dict[int, int] | None = {} if self._by_priority else None
        uncached: dict[str, int] = {}
        for waits, requests in ((False, list(queues.running)), (True, queues.waiting.snapshot())):
            for request in requests:
                left = request.num_tokens - request.num_computed
                if waits:
                    left = uncached[request.request_id] = self._left(request)
                elif left == 1 and request.spec.kind == "generate":
                    decoding += 1
                    left = 0
                if left:
                    tokens += left
                    pairs += left * (request.num_tokens - left / 2)
                if tenants is not None:
                    tenants[request.tenant] = tenants.get(request.tenant, 0) + left
                if priorities is not None and left:
                    level = request.priority
                    priorities[level] = priorities.get(level, 0) + left
                output += _output_left(request, answer or FIRST_ANSWER)
        self._uncached = uncached
        per_token, per_pair = times.slopes()
        one, most = times.decode(1), config.max_num_seqs
        row = max(times.decode(most) - one, 0.0) / (most - 1) if most > 1 else 0.0
        first = list(islice(changed.items(), _MOST_KEYS))
        return ReplicaReport(
            step=step,
            received=received,
            num_waiting=queues.num_waiting,
            num_running=queues.num_running,
            num_decoding=decoding,
            prompt_tokens=tokens,
            prompt_pairs=pairs,
            output_tokens=output,
            answer_tokens=answer,
            free_pages=self._pool.num_available,
            total_pages=self._pool.capacity,
            page_size=config.page_size,
            kv_type=config.kv_type,
            max_num_seqs=most,
            step_tokens=mixed_step_tokens(scheduler),
            seconds_per_token=per_token,
            seconds_per_pair=per_pair,
            decode_seconds=one,
            decode_row_seconds=row,
            tenants=self._shares(tenants or {}),
            priorities=tuple(sorted((priorities or {}).items())),
            adapters=() if scheduler.adapters is None else scheduler.adapters.ready_keys,
            published=tuple(digest for digest, known in first if known),
            evicted=tuple(digest for digest, known in first if not known),
            full=number != self._taken_list,
        )

    def _left(self, request: Request) -> int:
        """Tokens of a waiting request that are not cached, as of when it was first seen here."""
        known = self._uncached.get(request.request_id)
        if known is not None:
            return known
        return request.num_tokens - self._scheduler.prefixes.cached_tokens(request)

    def _shares(self, tenants: dict[str | None, int]) -> tuple[TenantWork, ...]:
        policy = self._scheduler.queues.policy
        return tuple(
            TenantWork(name, left, policy.weight(name) if isinstance(policy, FairPolicy) else 1.0)
            for name, left in tenants.items()
        )


def _output_left(request: Request, answer: float) -> float:
    """Expected tokens that are left of an answer: as long as the last ones, but at least 1."""
    if request.spec.kind != "generate":
        return 0.0
    generated = request.num_output_tokens
    return max(min(answer, request.max_len - request.num_prompt_tokens) - generated, 1.0)
