"""Which request runs how many tokens in the next step, and what a finished step means.

``plan()`` decides, ``commit()`` is the only place where a request advances, and the cost of both is
proportional to the requests that run (prompts are hashed once, when they are first looked at).

How a step is filled, with a budget of ``max_num_batched_tokens``:

1. Every running request that needs one token (decode) gets it.
2. What is left of the budget goes to prompts in progress, then to waiting requests, oldest first.
   Since the budget is at least ``max_num_seqs`` a prompt in progress gets at least one token per
   step however many requests decode, and decodes never wait for a long prompt.
3. A waiting request is admitted only with pages for all its known tokens, all or nothing, and only
   if one page stays available for each running request that may still need one (so that it is not
   thrown out by the next decode). A request whose longest answer fits the pages it holds counts for
   none, so ``max_num_seqs`` requests of full length run in exactly the pages they fill. Nobody
   overtakes the oldest waiting request, except while it waits for a prefix (below).

*Order* is arrival; with ``policy="priority"`` a smaller ``priority`` comes first. When a decode
needs a page and none is left, the last in this order is preempted: its pages go back, and it starts
over from its known tokens (or a fresh prefix hit) when there is room. A request with nobody behind
it waits a step in place. The first in order can take everything, and everything is enough (``add``
refuses what is not), so the first always advances and nobody starves. A waiting request does not
preempt a running one.

*Prefixes being computed.* A request whose next page is about to be published by a running one waits
for it instead of computing it again: this is how ``n`` answers share a prompt, and how a batch with
one system prompt computes it once. It keeps its place; others may be admitted meanwhile.

*Guidance.* A request with a guide (see ``Request``) takes two seats. In prefill the two share the
budget as it comes, but the last known token of either runs only in a step in which the other's does
too: that step has both rows of logits.

*Steady steps.* While all that runs are requests that need one token each, and nobody comes or goes,
``plan()`` returns the last plan once more and ``next_tokens`` says what its rows go on with.

*Without chunked prefill* every prompt runs in one step. A preempted request comes back with prompt
and output as its prompt, so the budget must hold ``max_model_len`` tokens, which is checked.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from sdk.engine.guides import in_prefill, longest_answer, share
from sdk.engine.pages import PagePool
from sdk.engine.plan import RequestStart, Sampled, StepPlan, StepResult
from sdk.engine.prefixes import Prefix, Prefixes
from sdk.engine.request import GUIDE_SUFFIX, Request, RequestStatus
from sdk.engine.scheduler_config import SchedulerConfig
from sdk.errors import RequestError
from sdk.outputs import FinishReason

_RUNNING = RequestStatus.RUNNING
_ORDER = attrgetter("order")


class RequestUpdate(NamedTuple):
    """What one step (or a deadline) changed for one request; ``request`` is its state now."""

    request: Request
    sampled: Sampled | None = None
    prompt_logprobs: tuple[Sampled, ...] = ()
    hidden: list[float] | None = None


class Scheduler:
    """Continuous batching over a :class:`PagePool`. Not thread-safe.

    ``plan`` and ``commit`` alternate. ``add``, ``abort`` and ``finish`` may come between the two: a
    step that is running ignores what it computes for a request that is gone.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.pool = PagePool(
            config.num_pages,
            config.page_size,
            config.enable_prefix_caching,
            limit=config.first_pages,
        )
        self.prefixes = Prefixes(self.pool, config.kv_type, config.num_swap_pages)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.clock = clock
        self._requests: dict[str, Request] = {}  # unfinished, by id
        self._waiting: list[Request] = []  # both sorted by Request.order
        self._running: list[Request] = []
        self._deadlines: list[tuple[float, int, Request]] = []  # heap
        self._dropped: list[str] = []
        self._expired: list[RequestUpdate] = []
        self._plan: StepPlan | None = None  # in flight, with what it runs:
        self._in_flight: list[tuple[Request, int]] = []
        #: Unless empty, the plan is the rows of the last one again: the tokens they go on with.
        self.next_tokens: list[int] = []
        # What runs are requests that need one token each, and nobody came or went since the plan:
        self._steady = False
        self._num_tokens: tuple[tuple[str, int], ...] = ()
        self._again: StepPlan | None = None  # with nothing but these rows
        self._full: list[Request] = []  # they need a page now, or so many steps from now:
        self.pages_ahead = 0
        self._num_added = 0
        self._step_id = self._num_steps = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_running(self) -> int:
        """Requests that hold pages (a guided one counts once)."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold none, preempted ones included."""
        return len(self._waiting)

    @property
    def num_steps(self) -> int:
        """Plans made so far."""
        return self._num_steps

    # Coming and going

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError for one that could never run, naming why."""
        config, num_tokens = self.config, request.num_tokens
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already in use")
        if request.request_id.endswith(GUIDE_SUFFIX):
            raise RequestError(
                f"request id {request.request_id!r} must not end in {GUIDE_SUFFIX!r}: "
                "guides have such ids"
            )
        if num_tokens == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        answer = 1 if request.kind == "generate" else 0
        if num_tokens + answer > config.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; max_model_len is {config.max_model_len}"
                + (", and at least 1 must be left for the answer" if answer else "")
            )
        room = self.prefixes.room(request)
        num_pages = -(-num_tokens // config.page_size)
        if num_pages > room:
            pinned = self.prefixes.num_pinned
            raise RequestError(
                f"the prompt needs {num_pages} KV pages of {config.page_size} tokens; "
                f"{room} are available in all"
                + (f": {pinned} of {self.pool.capacity} are pinned" if pinned else "")
            )
        params = request.params
        if not params.ignore_eos:
            request.stop_token_ids |= config.eos_token_ids
        # It may know one token more than the pages hold: the last one is never read back.
        request.max_len = min(config.max_model_len, room * config.page_size + 1)
        if request.guide is not None:
            request.max_len = num_tokens + longest_answer(request, request.guide, config, room)
        if params.max_tokens is not None:
            request.max_len = min(request.max_len, num_tokens + params.max_tokens)
        if request.guide is not None:
            request.guide.max_len = request.guide.num_tokens + request.max_len - num_tokens
        request.queued_ts = self.clock()
        self._num_added += 1
        priority = request.priority if config.policy == "priority" else 0
        request.order = (priority, request.arrival_time, self._num_added)
        if params.deadline is not None:
            request.deadline = request.arrival_time + params.deadline
            if len(self._deadlines) > 2 * len(self._requests) + 64:  # mostly of finished requests
                self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, self._num_added, request))
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_ORDER)

    def abort(self, request_id: str) -> Request | None:
        """End a request now, whatever it is doing; its pages are free at once. None: not known."""
        return self.finish(request_id, "abort")

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request for a reason found outside (a stop string, an error). None: not known."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, reason, stop_reason)
        return request

    def _end(self, request: Request, reason: FinishReason, stop: int | str | None = None) -> None:
        if request.status is _RUNNING:
            self._remove(self._running, request)
            self._release(request)
            if self._plan is None:  # else commit() looks at them once more
                self._in_flight = []
        else:
            self._remove(self._waiting, request)
        for sequence in request.sequences:
            sequence.status = RequestStatus(reason)
        request.stop_reason = stop
        del self._requests[request.request_id]

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        del queue[bisect_left(queue, request.order, key=_ORDER)]

    def _release(self, request: Request) -> None:
        """Take pages and promises from a running request, and have the ranks forget it."""
        for sequence in request.sequences:
            self.prefixes.release(sequence)
            self._dropped.append(sequence.request_id)
        self._steady, self._full = False, []

    def reset_prefix_cache(self) -> None:
        """Forget all cached and pinned prefixes; what runs goes on, but is not cached any more."""
        self.prefixes.reset()
        for request in self._running:
            for sequence in request.sequences:
                sequence.publishes = False

    @property
    def unfinished(self) -> Mapping[str, Request]:
        """Requests waiting and running, by id."""
        return self._requests

    def interlude(self) -> StepPlan:
        """Copies due before pages are written outside of a step, as a plan that is never committed.

        The ranks may forget how the last step went: the next one is planned anew.
        """
        self._steady, self._full = False, []
        return StepPlan(self._step_id, swaps=self.prefixes.swap.take_swaps())

    def resize(self, capacity: int) -> list[int]:
        """Have ``capacity`` pages from now on, between two steps; those given up.

        Where too few are idle the last requests in order are preempted.
        """
        pool, given_up = self.pool, []
        while pool.capacity > capacity:
            pages = pool.withhold(pool.capacity - capacity)
            given_up += pages
            if not pages:
                self._preempt(self._running.pop())
        pool.grant(capacity - pool.capacity)
        return given_up

    # A step

    def plan(self) -> StepPlan:
        """Decide the next step. Only queues and pages change; tokens count when committed."""
        if self._plan is not None:
            raise RuntimeError(f"step {self._step_id} was planned but not committed")
        if self._deadlines:
            self._expire(self.clock())
        self._num_steps += 1
        if self._steady and (plan := self._plan_again()) is not None:
            return plan
        self.next_tokens, self._again = [], None
        decodes: list[tuple[str, int]] = []
        chunks: list[tuple[str, int]] = []
        appended: list[tuple[str, tuple[int, ...]]] = []
        new_pages: list[tuple[str, tuple[int, ...]]] = []
        started: list[RequestStart] = []
        prefills: list[Request] = []
        self._in_flight = []
        everyone = self._plan_decodes(decodes, appended, new_pages, prefills)
        budget = self.config.max_num_batched_tokens - len(decodes)
        for request in prefills:
            for part in share(request, budget) if budget else ():
                budget -= part[1]
                self._in_flight.append(part)
        if self._waiting and budget and everyone:
            for request, shares in self._admit(budget, self.clock()):
                self._in_flight += shares
                started += [sequence.start() for sequence in request.sequences]
        for sequence, num in self._in_flight[len(decodes) :]:
            (decodes if num == 1 else chunks).append((sequence.request_id, num))
        alone = 0 < len(decodes) == len(self._running)  # nobody has a guide
        self._steady = everyone and alone and not (prefills or started)
        dropped, self._dropped = self._dropped, []
        self._step_id += 1
        self._num_tokens = tuple(decodes + chunks)
        self._plan = StepPlan(
            self._step_id,
            self._num_tokens,
            tuple(started),
            tuple(appended),
            tuple(new_pages),
            tuple(dropped),
            self.prefixes.swap.take_swaps(),
        )
        return self._plan

    def _plan_again(self) -> StepPlan | None:
        """The rows of the last plan once more. None: somebody may be admitted, or pages lack.

        While nobody needs a page it is the same object: nothing is made or looked at row by row.
        """
        if self._waiting and len(self._running) < self.config.max_num_seqs:
            return None
        plan = self._again
        if plan is None or self._full:
            pages = self.pool.acquire((), len(self._full))
            if pages is None:
                return None
            new_pages = []
            for request, page in zip(self._full, pages, strict=True):
                request.pages.append(page)
                new_pages.append((request.request_id, (page,)))
            self._step_id += 1
            plan = StepPlan(
                self._step_id,
                self._num_tokens,
                new_pages=tuple(new_pages),
                swaps=self.prefixes.swap.take_swaps(),
            )
            if not new_pages:
                self._again = plan
        self._plan = plan
        return plan

    def _plan_decodes(
        self,
        decodes: list[tuple[str, int]],
        appended: list[tuple[str, tuple[int, ...]]],
        new_pages: list[tuple[str, tuple[int, ...]]],
        prefills: list[Request],
    ) -> bool:
        """Give every running request that needs one token that token (its guide too).

        Those that need more are put into ``prefills``. Returns whether nobody lacked a page.
        """
        page_size, in_flight, everyone = self.config.page_size, self._in_flight, True
        for request in self._running:  # preemption shortens the list behind this one
            if in_prefill(request):
                prefills.append(request)
                continue
            sequences = request.sequences
            for sequence in sequences:
                if sequence.num_computed == len(sequence.pages) * page_size:
                    page = self._grow(sequence, request)
                    if page is None:
                        everyone = False  # the last in order waits for a page in place
                        break
                    new_pages.append((sequence.request_id, (page,)))
            else:
                for sequence in sequences:
                    request_id, known = sequence.request_id, sequence.num_computed
                    if known >= sequence.num_started:
                        appended.append((request_id, (sequence.token_ids[known],)))
                    decodes.append((request_id, 1))
                    in_flight.append((sequence, 1))
        return everyone

    def _grow(self, sequence: Request, request: Request) -> int | None:
        """One more page for a sequence of ``request``, taken from the last in order if need be."""
        while (pages := self.pool.acquire((), 1)) is None:
            if self._running[-1] is request:
                return None
            self._preempt(self._running.pop())
        sequence.pages += pages
        return pages[0]

    def _preempt(self, request: Request) -> None:
        """Send a request that was just taken out of the running ones back to wait."""
        self._release(request)
        for sequence in request.sequences:
            sequence.status = RequestStatus.PREEMPTED
            sequence.num_computed = 0  # what the cache has is looked up again on admission
        request.num_preemptions += 1
        self.num_preemptions += 1
        insort(self._waiting, request, key=_ORDER)

    def _admit(
        self, budget: int, now: float
    ) -> Iterator[tuple[Request, list[tuple[Request, int]]]]:
        """Start waiting requests in order while budget, seats and pages last."""
        waiting, index = self._waiting, 0
        spare = sum(map(self._may_grow, self._running))
        seats = sum(len(request.sequences) for request in self._running)
        while budget and index < len(waiting):
            request = waiting[index]
            sequences = request.sequences
            seats += len(sequences)  # one that waits for a prefix keeps its seat
            if seats > self.config.max_num_seqs or len(sequences) > budget:
                return
            if request.waits_for in self.prefixes.promised:
                index += 1
                continue
            if self.pool.num_available < request.min_available + spare and not self.pool.lender:
                return
            found = [self.prefixes.find(sequence) for sequence in sequences]
            request.waits_for = next((one.waits_for for one in sequences if one.waits_for), None)
            if request.waits_for is not None:
                index += 1
                continue
            num_computed = found[0].num_pages * self.config.page_size
            num = request.num_tokens - num_computed
            if num > budget and not self.config.enable_chunked_prefill:
                return
            if not self._acquire(request, found, spare):
                return
            spare += self._may_grow(request)
            del waiting[index]
            if request.num_cached is None:
                request.num_cached = num_computed
                request.scheduled_ts = now
            shares = share(request, budget)
            budget -= sum(num for _, num in shares)
            yield request, shares

    def _may_grow(self, request: Request) -> int:
        """How many of its sequences need more pages than they hold for the longest answer."""
        if request.kind == "embed":
            return 0
        size = self.config.page_size
        # the last token of an answer is never read back: its KV is not stored
        return sum(len(one.pages) * size < one.max_len - 1 for one in request.sequences)

    def _acquire(self, request: Request, found: list[Prefix], spare: int) -> bool:
        """Make a waiting request a running one with pages for all its tokens, or change nothing."""
        request.min_available = self.prefixes.acquire(request, found, spare)
        if request.min_available:
            return False  # asking again is pointless with fewer
        for sequence in request.sequences:
            sequence.num_started = sequence.num_tokens
            sequence.status = _RUNNING
        insort(self._running, request, key=_ORDER)
        return True

    def _expire(self, now: float) -> None:
        """End the requests whose deadline has passed; the next commit reports them."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.finished:
                self._end(request, "deadline")
                self._expired.append(RequestUpdate(request))

    def commit(self, plan: StepPlan, result: StepResult | list[int]) -> list[RequestUpdate]:
        """Advance the requests of ``plan`` by what came out; returns those with news."""
        step_id = plan.step_id if isinstance(result, list) else result.step_id
        if plan is not self._plan or step_id != plan.step_id:
            expected = "none" if self._plan is None else self._plan.step_id
            raise RuntimeError(
                f"commit of plan {plan.step_id} with the result of step {step_id}; "
                f"the step in flight is {expected}"
            )
        now = self.clock()
        updates, self._expired = self._expired, []
        in_flight, self._plan = self._in_flight, None
        if isinstance(result, list):
            self._commit_tokens(in_flight, result, now, updates)
            return updates
        page_size = self.config.page_size
        errors, prompt_logprobs = result.errors, result.prompt_logprobs
        for request, num in in_flight:
            if request.status is not _RUNNING:
                continue  # aborted while the step ran
            if errors and request.request_id in errors:
                self._fail(request, errors[request.request_id], updates)
                continue
            before = request.num_computed
            after = request.num_computed = before + num
            if before < request.num_prompt_tokens:
                self.num_prompt_tokens += min(after, request.num_prompt_tokens) - before
            if request.publishes and after // page_size > request.num_published:
                self.prefixes.publish(request, after // page_size)
            scored: tuple[Sampled, ...] = ()
            if prompt_logprobs and request.request_id in prompt_logprobs:
                # After a preemption the first positions come a second time.
                known = max(0, request.num_prompt_scored - before)
                scored = prompt_logprobs[request.request_id][known:]
                request.num_prompt_scored += len(scored)
            if after == len(request.token_ids):
                self._complete(request, result, scored, now, updates)
            elif scored:
                updates.append(RequestUpdate(request, None, scored))
        if self._steady:
            self.next_tokens = [request.token_ids[-1] for request, _ in in_flight]
            self._full = [request for request, _ in in_flight if self._lacks_page(request)]
        else:
            self._in_flight = []
        return updates

    def _commit_tokens(
        self,
        in_flight: list[tuple[Request, int]],
        tokens: list[int],
        now: float,
        updates: list[RequestUpdate],
    ) -> None:
        """Commit a plan that was the last one once more: a token for each, and nothing else."""
        page_size, ahead = self.config.page_size, self.pages_ahead
        full: list[Request] = []
        row = -1
        for request, _ in in_flight:
            row += 1
            if request.status is not _RUNNING:
                continue  # aborted while the step ran
            token_id, known = tokens[row], request.token_ids
            after = request.num_computed = len(known)
            if not after % page_size and request.publishes:
                self.prefixes.publish(request, after // page_size)
            if (after + ahead) % page_size <= ahead and self._lacks_page(request):
                full.append(request)
            known.append(token_id)
            self.num_generation_tokens += 1
            request.last_token_ts = now
            if (
                request.watched
                or token_id in request.stop_token_ids
                or len(known) >= request.max_len
            ):
                self._report(request, Sampled(token_id), (), updates)
        if self._steady:
            self.next_tokens, self._full = tokens, full
        else:
            self._in_flight = []

    def _lacks_page(self, request: Request) -> bool:
        """Whether a request needs a page more; its last token is never read back."""
        needed = min(request.num_computed + self.pages_ahead, request.max_len - 2)
        return len(request.pages) * self.config.page_size <= needed

    def _complete(
        self,
        request: Request,
        result: StepResult,
        scored: tuple[Sampled, ...],
        now: float,
        updates: list[RequestUpdate],
    ) -> None:
        """All known tokens have run: there is a next token, or the embedding."""
        request_id = request.request_id
        if request.kind == "embed":
            hidden = result.hidden.get(request_id)
            if hidden is None:
                self._fail(request, "the step returned no embedding", updates)
                return
            self._end(request, "stop")
            updates.append(RequestUpdate(request, None, scored, hidden))
            return
        sampled = result.sampled.get(request_id)
        if sampled is None:
            self._fail(request, "the step returned no token", updates)
            return
        request.token_ids.append(sampled.token_id)
        if request.guide is not None:
            request.guide.token_ids.append(sampled.token_id)
        self.num_generation_tokens += 1
        request.last_token_ts = now
        if request.first_token_ts is None:
            request.first_token_ts = now
        self._report(request, sampled, scored, updates)

    def _report(
        self,
        request: Request,
        sampled: Sampled,
        scored: tuple[Sampled, ...],
        updates: list[RequestUpdate],
    ) -> None:
        """A request has one more token: end it where that was the last, tell who watches."""
        token_id = sampled.token_id
        if (
            token_id in request.stop_token_ids
            and request.num_output_tokens >= request.params.min_tokens
        ):
            is_eos = token_id in self.config.eos_token_ids and not request.params.ignore_eos
            self._end(request, "stop", None if is_eos else token_id)
        elif len(request.token_ids) >= request.max_len:
            self._end(request, "length")
        elif not (request.watched or scored):
            return
        updates.append(RequestUpdate(request, sampled, scored))

    def _fail(self, request: Request, message: str, updates: list[RequestUpdate]) -> None:
        """End one request in error. Its pages may hold NaN: nobody must find them in the cache."""
        for sequence in request.sequences:
            self.prefixes.distrust(sequence)
        self._end(request, "error", message)
        updates.append(RequestUpdate(request))

    def rollback(self) -> None:
        """Undo a step that was interrupted: everything that ran starts over from its known tokens.

        What the ranks did of the step is unknown, so they are told to forget all of it.
        """
        if self._plan is not None:
            self._dropped = [*self._plan.dropped, *self._dropped]
            self.prefixes.undo(self._plan.swaps)
            self._plan, self._in_flight, self._steady = None, [], False
            while self._running:
                self._preempt(self._running.pop())

    def check(self) -> None:
        """Assert that queues, pages and counters agree (tests call it after every event)."""
        sequences = [one for request in self._running for one in request.sequences]
        self.pool.check([*(one.pages for one in sequences), *self.prefixes.pins])
        self.prefixes.swap.check()
        queued = self._waiting + self._running
        assert {r.request_id: r for r in queued} == self._requests, "a request is lost or twice"
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_ORDER), "a queue is out of order"
        assert len(sequences) <= self.config.max_num_seqs, "too many requests run"
        for request in self._waiting:
            for one in request.sequences:
                assert not one.pages and not one.num_computed, "a waiting request holds KV"
        for one in sequences:
            assert one.status is _RUNNING, "a running request is not marked so"
            held = len(one.pages) * self.config.page_size
            assert one.num_computed <= min(held, one.num_tokens - 1), "computed too much"
            assert one.num_tokens <= one.max_len, "a request is too long"
        for request in queued:
            if request.guide is not None:
                answers = request.output_token_ids, request.guide.output_token_ids
                assert answers[0] == answers[1], "a guide and its request have different answers"
        assert set(self.prefixes.promised.values()) <= set(sequences), "a promise nobody keeps"
        assert all(math.isfinite(moment) for moment, _, _ in self._deadlines)
