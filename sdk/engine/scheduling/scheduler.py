"""Which request runs how many tokens in the next step, and what a finished step means.

``plan()`` decides, ``commit()`` is the only place where a request advances, and the cost of both is
proportional to the requests that run (prompts are hashed once, when they are first looked at).

How a step is filled, with a budget of ``max_num_batched_tokens`` (or fewer, for a host that has
little time):

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

*Drafts.* Behind a request's next token a step may run tokens that a drafter expects there
(drafts.py). Where prompts are there too, drafts get half of what decodes leave of the budget.

*Steady steps.* While all that runs are requests that need one token each, and nobody comes or goes,
``plan()`` returns the last plan once more, or one with the same rows and new pages.

*Several batches in flight.* ``plan`` may be called again before ``commit``, up to
``batches_in_flight`` times. What one batch runs is in no other. See ``Scheduler``.

*Without chunked prefill* every prompt runs in one step. A preempted request comes back with prompt
and output as its prompt, so the budget must hold ``max_model_len`` tokens, which is checked.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from sdk.engine.pages.ladder_pool import LadderPool
from sdk.engine.pages.prefixes import Prefix
from sdk.engine.plan import RequestStart, StepPlan, StepRow
from sdk.engine.scheduling.commit import Commits
from sdk.engine.scheduling.drafts import Drafts
from sdk.engine.scheduling.guides import in_prefill, share
from sdk.engine.scheduling.queues import ORDER, Batch
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.outputs import RequestEvent

#: From so many tokens on a GPU computes for longer than it reads the weights: at 990 TFLOP/s and
#: 3.35 TB/s (H100, 16 bits) from 295; by arithmetic, not measured.
_LEAST_BESIDE = 512
_NOBODY: frozenset[Request] = frozenset()


class Scheduler(Commits):
    """Continuous batching over a :class:`PagePool`. Not thread-safe.

    Plans are committed in their order. ``add``, ``abort`` and ``finish`` may come between ``plan``
    and ``commit``: a step that is running ignores what it computes for a request that is gone. Its
    pages may be another's by then: ranks run steps in order, so what the next owner writes comes
    later.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(config, clock)
        self._num_tokens = 0  # of the last plan
        self._again: Batch | None = None  # a steady plan without new pages
        self._step_id = self._num_steps = 0
        #: Plans that may be in flight: 1, or 2 on a GPU, or the stages of a pipeline.
        self.batches_in_flight = 1
        #: A batch beside another has at least so many tokens, all of prompts: those who decode
        #: stay together, because weights that are read for few rows are read for all of them. 0:
        #: each batch takes its share of those who decode (the stages of a pipeline).
        self.least_beside = _LEAST_BESIDE
        #: Where it is None there are no drafts.
        self.drafts: Drafts | None = None

    @property
    def num_steps(self) -> int:
        """Plans made so far."""
        return self._num_steps

    def interlude(self) -> StepPlan:
        """Copies and moves due before pages are read or written outside of a step, as a plan that
        is never committed; ``undo`` takes it back.

        The ranks may forget how the last step went: the next one is planned anew. No step may be
        in flight.
        """
        assert not self._launched
        self._steady, self._full = None, []
        return StepPlan(self._step_id, copies=self.pool.take_copies())

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

    @property
    def num_tokens(self) -> int:
        """Tokens of the step that was planned last."""
        return self._num_tokens

    @property
    def steady(self) -> bool:
        """Whether the last plan was one of decodes alone, so that the next one may be the same."""
        return self._steady is not None

    @property
    def num_in_flight(self) -> int:
        """Plans that were not committed yet."""
        return len(self._launched)

    @property
    def decodes(self) -> bool:
        """Whether a request needs one token in the next step."""
        return any(not in_prefill(request) for request in self._running)

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest step that can be planned now."""
        decoding = [request for request in self._running if not in_prefill(request)]
        prompts = len(decoding) < len(self._running) or len(self._waiting) > 0
        return sum(len(request.sequences) for request in decoding) + prompts

    def plan(self, most_tokens: int | None = None) -> StepPlan | None:
        """Decide the next step. Only queues and pages change; tokens count when committed.

        ``most_tokens``: prompts and drafts are to make the step no larger than this. Something
        always runs, and without chunked prefill a whole prompt. None: steps are in flight, and
        beside them there is nothing to run.
        """
        if len(self._launched) >= self.batches_in_flight:
            raise RuntimeError(f"step {self._step_id} was planned but not committed")
        if self._deadlines:
            self._expire(self.clock())
        if self._steady is not None and (batch := self._plan_again(self._steady)) is not None:
            self._num_steps += 1
            self._launched.append(batch)
            return batch.plan
        busy = self._busy() if self._launched else _NOBODY
        if busy and self._tokens_beside(busy) < self.least_beside:
            return None
        return self._plan_anew(most_tokens, busy)

    def _plan_anew(self, most_tokens: int | None, busy: frozenset[Request]) -> StepPlan | None:
        """:meth:`plan`, request by request, without those that are ``busy`` in other steps."""
        self._steady = self._again = None
        started: list[RequestStart] = []
        new_pages: list[tuple[str, tuple[int, ...]]] = []
        decodes: list[tuple[Request, StepRow]] = []
        prefills: list[Request] = []
        complete = self._plan_decodes(decodes, new_pages, prefills, busy)
        num_decodes = len(decodes)
        budget = self.config.max_num_batched_tokens - num_decodes
        if most_tokens is not None and self.config.enable_chunked_prefill:
            # a guided request is begun with a token of each of its two sequences
            budget = min(budget, max(most_tokens - num_decodes, 2))
        if self.drafts is not None:
            budget -= self._add_drafts(
                self.drafts, decodes, new_pages, budget, beside=bool(prefills or self._waiting)
            )
        # A scored row costs as much as the head of a token and a pass over its logits: 256 of them
        # would keep those that decode waiting. Where nobody decodes nobody waits.
        chunked = self.config.enable_chunked_prefill
        scoring = self.config.max_scored_tokens if decodes and chunked else budget
        parts: list[tuple[Request, int]] = []
        for request in prefills:
            most = min(budget, scoring) if request.scores_prompt else budget
            for part in share(request, most) if most else ():
                budget -= part[1]
                scoring -= part[1] if request.scores_prompt else 0
                parts.append(part)
        if self._waiting and budget and complete:
            for request, shares in self._admit(budget, scoring, self.clock()):
                parts += shares
                started += [sequence.start() for sequence in request.sequences]
        rows = decodes + [(sequence, _row(sequence, num)) for sequence, num in parts]
        if busy and not (rows or new_pages):
            return None
        rows.sort(key=_several)  # of one token first
        batch = self._launch(rows, started, new_pages, num_decodes)
        alone = 0 < num_decodes == len(self._running)  # nobody has a guide
        others = busy or prefills or started
        if complete and alone and not others and self.drafts is None:
            self._steady = batch
        return batch.plan

    def _launch(
        self,
        rows: list[tuple[Request, StepRow]],
        started: list[RequestStart],
        new_pages: list[tuple[str, tuple[int, ...]]],
        num_decodes: int,
    ) -> Batch:
        """A batch, in flight from now on."""
        self._num_steps += 1
        self._step_id += 1
        self._num_tokens = sum(row.num_tokens for _, row in rows)
        dropped, self._dropped = self._dropped, []
        plan = StepPlan(
            self._step_id,
            tuple(row for _, row in rows),
            tuple(started),
            tuple(new_pages),
            tuple(dropped),
            self.pool.take_copies(),
        )
        if self.ladder is not None:
            plan = self._placed(plan, self.ladder)
        batch = Batch(plan, [sequence for sequence, _ in rows], num_decodes)
        self._launched.append(batch)
        return batch

    def _busy(self) -> frozenset[Request]:
        """Who is in flight, guides too."""
        return frozenset(sequence for batch in self._launched for sequence in batch.sequences)

    def _tokens_beside(self, busy: frozenset[Request]) -> int:
        """Tokens of prompts that could run beside what is in flight; or all that is asked for,
        where somebody waits to decode and nobody decodes in flight.
        """
        tokens, decoding = 0, self._decoding
        for request in chain(self._running, self._waiting):
            if tokens >= self.least_beside:
                break
            if not busy.isdisjoint(request.sequences):
                continue
            if in_prefill(request):
                tokens += request.num_tokens - request.num_computed
            elif request.pages and not decoding:
                return self.least_beside
        return tokens

    @property
    def _decoding(self) -> bool:
        """Whether somebody decodes in a step in flight."""
        return any(batch.num_decodes for batch in self._launched)

    def _placed(self, plan: StepPlan, ladder: LadderPool) -> StepPlan:
        """The plan in the places of its pages; requests note which of theirs went down for it."""
        if lowered := ladder.take_lowered():
            now = self.clock()
            for request in self._running:
                pages = (page for one in request.sequences for page in one.pages)
                bits = Counter(lowered[page] for page in pages if page in lowered)
                request.events += tuple(
                    RequestEvent(now, "recoded", num_pages=count, kv_bits=kind)
                    for kind, count in bits.items()
                )
        return ladder.placed(plan)

    def _plan_again(self, last: Batch) -> Batch | None:
        """The rows of the last plan once more. None: somebody may be admitted, or pages lack.

        While nobody needs a page it is the same object: nothing is made or looked at row by row.
        """
        if self._launched or (self._waiting and len(self._running) < self.config.max_num_seqs):
            return None
        if self._again is not None and not self._full:
            self._steady = self._again
            return self._again
        pages = self.pool.acquire((), len(self._full))
        if pages is None:
            return None
        new_pages = []
        for request, page in zip(self._full, pages, strict=True):
            request.pages.append(page)
            new_pages.append((request.request_id, (page,)))
        self._step_id += 1
        copies = self.pool.take_copies()
        plan = StepPlan(self._step_id, last.plan.rows, new_pages=tuple(new_pages), copies=copies)
        if self.ladder is not None:
            plan = self._placed(plan, self.ladder)
        batch = self._steady = Batch(plan, last.sequences, last.num_decodes)
        if not (new_pages or copies):
            self._again = batch
        return batch

    def _plan_decodes(
        self,
        decodes: list[tuple[Request, StepRow]],
        new_pages: list[tuple[str, tuple[int, ...]]],
        prefills: list[Request],
        busy: frozenset[Request],
    ) -> bool:
        """Give every running request that needs one token that token (its guide too).

        Those that need more are put into ``prefills``. Returns whether nobody lacked a page.
        """
        page_size, complete = self.config.page_size, True
        most = self.config.max_num_seqs
        if self.least_beside and self._decoding:
            most = 0
        elif self.batches_in_flight > 1 and not self.least_beside:
            # as many as each of the batches has if they share
            seats = sum(len(r.sequences) for r in self._running if not in_prefill(r))
            most = max(-(-seats // self.batches_in_flight), 2)  # a guided one takes two
        for request in self._running:  # preemption shortens the list behind this one
            if busy and not busy.isdisjoint(request.sequences):
                continue
            if in_prefill(request):
                prefills.append(request)
                continue
            sequences = request.sequences
            if len(decodes) + len(sequences) > most:
                continue
            for sequence in sequences:
                if sequence.num_computed == len(sequence.pages) * page_size:
                    page = self._grow(sequence, request, busy)
                    if page is None:
                        complete = False  # the last in order waits for a page in place
                        break
                    new_pages.append((sequence.request_id, (page,)))
            else:
                for sequence in sequences:
                    decodes.append((sequence, _row(sequence, 1)))
        return complete

    def _add_drafts(
        self,
        drafts: Drafts,
        decodes: list[tuple[Request, StepRow]],
        new_pages: list[tuple[str, tuple[int, ...]]],
        budget: int,
        *,
        beside: bool,
    ) -> int:
        """Put drafts behind those who decode, now that all of them have pages; how many.

        ``beside``: there are prompts too.
        """
        left = most = budget // 2 if beside else budget
        for index, (request, row) in enumerate(decodes):
            held = len(request.pages)
            if found := drafts.take(request, left, self.pool):
                left -= len(found)
                num = 1 + len(found)
                decodes[index] = (
                    request,
                    row._replace(num_tokens=num, num_outputs=num, drafts=found),
                )
            if len(request.pages) > held:
                new_pages.append((request.request_id, tuple(request.pages[held:])))
        return most - left

    def _grow(self, sequence: Request, request: Request, busy: frozenset[Request]) -> int | None:
        """One more page for a sequence of ``request``, taken from the last in order if need be.

        What is in flight keeps its pages.
        """
        while (pages := self.pool.acquire((), 1)) is None:
            last = self._running[-1]
            if last is request or not busy.isdisjoint(last.sequences):
                return None
            self._preempt(self._running.pop())
        sequence.pages += pages
        return pages[0]

    def _admit(
        self, budget: int, scoring: int, now: float
    ) -> Iterator[tuple[Request, list[tuple[Request, int]]]]:
        """Start waiting requests in order while budget, seats and pages last.

        One whose results have no room yet waits for those of others, and lets pass who needs none.
        """
        waiting, index, crowded = self._waiting, 0, False
        spare = sum(map(self._may_grow, self._running))
        seats = sum(len(request.sequences) for request in self._running)
        while budget and index < len(waiting):
            request = waiting[index]
            sequences = request.sequences
            lacks_room = self._lacks_room(request, crowded)
            if lacks_room or (request.scores_prompt and not scoring):
                crowded |= lacks_room
                index += 1
                continue
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
            else:
                request.events += (RequestEvent(now, "resumed", num_tokens=num_computed),)
            request.events += self._swapped_in(found, now)
            scored = request.scores_prompt
            shares = share(request, min(budget, scoring) if scored else budget)
            num = sum(num for _, num in shares)
            budget -= num
            scoring -= num if scored else 0
            yield request, shares

    def _lacks_room(self, request: Request, crowded: bool) -> bool:
        """Whether its results cannot be kept beside those of others, or of who came before it."""
        room = request.results
        if room is None or room.held:
            return False
        return crowded or self._result_bytes + room.nbytes > self.config.max_result_bytes

    def _swapped_in(self, found: list[Prefix], now: float) -> tuple[RequestEvent, ...]:
        """What a request tells of its pages that came back, by the bits they have."""
        level, bits = self.prefixes.swap.level, self.config.kv_bits
        levels = Counter(level(key) for prefix in found for key in prefix.swapped)
        return tuple(
            RequestEvent(now, "swapped_in", num_pages=count, kv_bits=bits[depth])
            for depth, count in levels.items()
        )

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
            sequence.status = RequestStatus.RUNNING
        if request.results is not None and not request.results.held:
            request.results.held = True
            self._result_bytes += request.results.nbytes
        insort(self._running, request, key=ORDER)
        return True

    def rollback(self) -> None:
        """Undo the steps in flight: one was interrupted, and all are given up."""
        if self._launched:
            self.undo(*(batch.plan for batch in self._launched))

    def undo(self, *plans: StepPlan) -> None:
        """Have everything that ran start over from its known tokens: ``plans`` were interrupted.

        What the ranks did of them is unknown, so they are told to forget all of it.
        """
        self._dropped = [*(name for plan in plans for name in plan.dropped), *self._dropped]
        self.prefixes.undo([one for plan in plans for one in plan.copies])
        self._launched.clear()
        self._steady, self._full = None, []
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
            assert queue == sorted(queue, key=ORDER), "a queue is out of order"
        assert len(sequences) <= self.config.max_num_seqs, "too many requests run"
        for request in self._waiting:
            for one in request.sequences:
                assert not one.pages and not one.num_computed, "a waiting request holds KV"
        for one in sequences:
            assert one.status is RequestStatus.RUNNING, "a running request is not marked so"
            held = len(one.pages) * self.config.page_size
            assert one.num_computed <= min(held, one.num_tokens - 1), "computed too much"
            assert one.num_tokens <= one.max_len, "a request is too long"
        for request in queued:
            if request.guide is not None:
                answers = request.output_token_ids, request.guide.output_token_ids
                assert answers[0] == answers[1], "a guide and its request have different answers"
        assert set(self.prefixes.promised.values()) <= set(sequences), "a promise nobody keeps"
        assert all(math.isfinite(moment) for moment, _, _ in self._deadlines)


def _row(sequence: Request, num_tokens: int) -> StepRow:
    """A row of known tokens alone."""
    ends = sequence.num_computed + num_tokens == sequence.num_tokens
    outputs = 1 if ends and sequence.kind == "generate" else 0
    return StepRow(sequence.request_id, num_tokens, outputs, (), sequence.adapter_slot)


def _several(part: tuple[Request, StepRow]) -> bool:
    return part[1].num_tokens > 1
