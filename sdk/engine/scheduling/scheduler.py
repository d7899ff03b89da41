"""Decides which request runs how many tokens in the next step: continuous batching.

``plan()`` decides and ``commit()`` advances the requests by what the step computed. The cost of
both is proportional to the number of running requests (a prompt is hashed once, when it is first
looked at). The parts: ``queues.py`` holds the requests, ``policy.py`` orders them, ``admission.py``
starts waiting ones, ``prompt_steps.py`` divides the rest of a step among prompts, ``commit.py``
applies results, ``in_flight.py`` holds the batches in between.

A step has a budget of ``max_num_batched_tokens`` (or less, for a host that has little time):

1. Every running request that needs one token (decode) gets it.
2. The rest of the budget goes to prompts in progress, then to waiting requests, in the policy's
   order. The budget is at least ``max_num_seqs``, so some prompt gets at least one token per step
   however many requests decode, and decodes never wait for a long prompt.
3. Waiting requests are admitted with pages for all their known tokens (``admission.py``).

*Preemption.* When a decode needs a page and none is left, the last running request in the policy's
order is preempted: it gives back its pages and starts over from its known tokens (or from a new
prefix hit) when there is room. A request that is itself the last one waits for a step. The first
request in order can take every page, and all pages together are enough for it (``add`` rejects
requests for which they are not), so it always advances and no request starves. A waiting request
preempts running ones only if the policy says that it overtakes them (``Admission.make_room``), and
only after they ran for a while (``RequestQueues.may_preempt``).

*Negative prompts.* A request with a negative prompt runs as two sequences (``negative_prompt.py``).

*Drafts.* After a request's next token a step may run draft tokens (``drafts.py``). If there are
prompts too, drafts get half of the budget that decodes leave.

*Repeated batches.* While all running requests need one token each, no request comes or goes, and
none gets drafts, ``plan()`` returns the last plan again, or one with the same rows and new pages.
While requests wait that might overtake, every eighth step is planned request by request.

*Several batches in flight.* ``plan`` may be called again before ``commit``, up to
``batches_in_flight`` times. A request is in one batch at a time. See ``Scheduler``.

*Without chunked prefill* every prompt runs in one step. A preempted request comes back with prompt
and output as its prompt, so the budget must hold ``max_model_len`` tokens; this is checked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from sdk.api.outputs import RequestEvent
from sdk.engine.pages.groups import Groups
from sdk.engine.pages.page_pool import PagePool
from sdk.engine.pages.prefixes import Prefixes
from sdk.engine.pages.tiered_pool import TieredPagePool, lowest_tiers
from sdk.engine.plan import Encoding, RequestStart, StepPlan, StepResult, StepRow
from sdk.engine.recorder import MetricsRecorder
from sdk.engine.scheduling.admission import Admission
from sdk.engine.scheduling.commit import Committer
from sdk.engine.scheduling.images import Images
from sdk.engine.scheduling.in_flight import Batch, InFlightBatches
from sdk.engine.scheduling.negative_prompt import in_prefill
from sdk.engine.scheduling.prompt_steps import PromptSteps
from sdk.engine.scheduling.queues import RequestQueues, RequestUpdate
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.engine.scheduling.step_times import StepTimes

if TYPE_CHECKING:
    from sdk.engine.scheduling.adapter_slots import AdapterSlots
    from sdk.engine.scheduling.drafts import Drafts

#: From this many tokens on, a GPU computes for longer than it reads the weights: at 990 TFLOP/s and
#: 3.35 TB/s (H100, 16 bits) from 295; by arithmetic, not measured.
_MIN_CONCURRENT_TOKENS = 512
#: The prompts that wait are computed in this many steps for each stage of a pipeline, if they have
#: tokens enough.
_STEPS_PER_STAGE = 4
#: While requests wait that might overtake running ones, one of this many steps looks at them.
_LOOK_EVERY = 8
#: So many waiting requests are looked at for where they leave prompts that run.
_LOOK_AHEAD = 16
_NO_SEQUENCES: frozenset[Request] = frozenset()


class Scheduler:
    """Continuous batching over a :class:`PagePool`. Not thread-safe.

    Plans are committed in their order. Requests may be added and ended between ``plan`` and
    ``commit``: what a running step computes for a request that has gone is ignored. Its pages may
    belong to another request by then. Ranks run steps in order, so the next owner writes later.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.tiered_pool: TieredPagePool | None = None
        pages = config.num_pages, config.page_size, config.enable_prefix_caching
        if len(config.kv_bits) > 1:
            self.tiered_pool = TieredPagePool(
                *pages,
                config.first_pages,
                config.kv_bits,
                self._lowest_tiers,
                config.prefix_eviction,
            )
        self.pool = self.tiered_pool or PagePool(
            *pages, limit=config.first_limit, eviction=config.prefix_eviction
        )
        #: What requests hold besides pages; ``None``: nothing.
        self.groups: Groups | None = None
        if config.has_groups:
            self.pool.unit_bytes = config.page_bytes
            self.groups = Groups(config, self.pool)
        swap = config.num_swap_pages, config.swap_parts
        self.prefixes = Prefixes(self.pool, config.kv_type, self.tiered_pool, self.groups, *swap)
        self._in_flight = InFlightBatches()
        #: ``None``: requests cannot have adapters.
        self.adapters: AdapterSlots | None = None
        if config.adapter_slots:
            from sdk.engine.scheduling.adapter_slots import AdapterSlots

            patience = config.max_num_seqs  # a batch of requests may overtake one that waits
            self.adapters = AdapterSlots(config.adapter_slots, config.adapter_bytes, patience)
        self.queues = RequestQueues(config, self.prefixes, self._in_flight, clock, self.adapters)
        self.recorder = recorder = MetricsRecorder(clock())
        self.images = images = None if config.images is None else Images(config.images)
        self.admission = Admission(config, self.queues, self.prefixes, recorder, self.adapters)
        self.admission.images = images
        self._prompts = PromptSteps(config, self.queues, self.admission, self.groups, images)
        self.committer = Committer(config, self.queues, self.prefixes, self._in_flight, recorder)
        self.num_rewinds = 0
        self._num_tokens = 0  # of the last plan
        self._step_id = self._num_steps = 0
        self._num_looked = 0  # requests when the waiting ones were last looked at for snapshots
        self._num_added = 0  # requests when a step was last planned request by request
        #: In repeated batches a request gets a new page this many steps before it needs it.
        self.pages_ahead = 0
        #: Plans that may be in flight: 1, or 2 on a GPU, or the stages of a pipeline.
        self.batches_in_flight = 1
        #: The fewest tokens of a batch that runs next to another one. All of them are of prompts:
        #: decoding requests stay in one batch, because the weights are read once for all rows.
        #: 0: each batch takes its share of the decoding requests (the stages of a pipeline).
        self.min_concurrent_tokens = _MIN_CONCURRENT_TOKENS
        #: ``None``: no drafts.
        self.drafts: Drafts | None = None
        self.times = StepTimes()
        self._paused = False  # whether some requests did not decode for an urgent prompt
        self._planned_at = 0.0  # with drafts: when the last plan was begun

    @property
    def num_steps(self) -> int:
        """Plans made so far."""
        return self._num_steps

    def plan_copies(self) -> StepPlan:
        """The copies and moves that are due before pages are read or written outside of a step.

        The plan is never committed; ``undo`` takes it back. The ranks may forget the last step: the
        next one is planned request by request. No step may be in flight.
        """
        assert not self._in_flight
        self._in_flight.stop_repeating()
        return StepPlan(self._step_id, copies=self.pool.take_copies())

    def resize(self, capacity: int) -> list[int]:
        """Between two steps: set the number of pages. Returns the pages that were given up.

        If too few pages are unused, the last requests in order are preempted.
        """
        pool, given_up = self.pool, []
        while pool.capacity > capacity:
            pages = pool.withhold(pool.capacity - capacity)
            given_up += pages
            if not pages:
                self.queues.preempt_last()
        pool.grant(capacity - pool.capacity)
        return given_up

    @property
    def num_tokens(self) -> int:
        """Tokens of the step that was planned last."""
        return self._num_tokens

    @property
    def repeats(self) -> bool:
        """Whether the last plan contained only decodes, so that the next one may repeat it."""
        return self._in_flight.repeatable is not None

    @property
    def num_in_flight(self) -> int:
        """Plans that were not committed yet."""
        return len(self._in_flight.batches)

    @property
    def decodes(self) -> bool:
        """Whether a request needs one token in the next step."""
        return any(not in_prefill(request) for request in self.queues.running)

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest step that can be planned now."""
        decoding = [request for request in self.queues.running if not in_prefill(request)]
        prompts = len(decoding) < len(self.queues.running) or len(self.queues.waiting) > 0
        return sum(len(request.sequences) for request in decoding) + prompts

    def plan(self, most_tokens: int | None = None) -> StepPlan | None:
        """Decide the next step. Only queues and pages change; tokens count when committed.

        ``most_tokens``: prompts and drafts make the step no larger than this, except that at least
        one token runs, and without chunked prefill a whole prompt. Returns ``None`` if steps are
        in flight and there is nothing to run next to them.
        """
        in_flight = self._in_flight
        if len(in_flight.batches) >= self.batches_in_flight:
            raise RuntimeError(f"step {self._step_id} was planned but not committed")
        self.queues.expire()
        last, drafts = in_flight.repeatable, self.drafts
        if drafts is not None:
            self._planned_at = self.queues.clock()
            if last is not None and not in_flight.batches:
                most = self.config.max_num_batched_tokens
                budget = min(most, most_tokens or most) - len(last.sequences)
                if drafts.choose(last.sequences, budget, self._num_steps, repeats=True):
                    last = None
        if last is not None and (batch := self._plan_again(last)) is not None:
            self._num_steps += 1
            in_flight.batches.append(batch)
            return batch.plan
        if last is not None and in_flight.batches and not self.queues.waiting.count:
            return None  # it contains everything that runs
        busy = in_flight.sequences() if in_flight.batches else _NO_SEQUENCES
        if busy and self._concurrent_tokens(busy) < self.min_concurrent_tokens:
            return None
        return self._plan_anew(most_tokens, busy)

    def commit(self, result: StepResult) -> list[RequestUpdate]:
        """Advance the requests of the oldest plan in flight; returns what changed for whom."""
        drafts, batches = self.drafts, self._in_flight.batches
        if drafts is not None and len(batches) == 1:
            rows = batches[0].plan.rows
            if batches[0].num_decodes == len(rows) and batches[0].plan.encoding is None:
                seconds = self.queues.clock() - self._planned_at
                drafts.learn_step(rows, self._num_tokens, seconds)
            if result.forced:
                drafts.look_again()
        first = batches[0] if batches else None
        updates = self.committer.commit(result, self.pages_ahead)
        if self.images is not None and first is not None:
            updates += self.committer.commit_images(self.images, first, result)
        if not self.queues.unfinished:  # the time until the next request comes does not count
            self._end_steps()
        return updates

    def _end_steps(self) -> None:
        """Learn how long the steps since the last one planned request by request took."""
        generated = self.committer.num_generation_tokens
        self.times.end(self.queues.clock(), self._num_steps, generated)

    def _plan_anew(self, most_tokens: int | None, busy: frozenset[Request]) -> StepPlan | None:
        """:meth:`plan`, request by request, without those that are ``busy`` in other steps."""
        queues, in_flight = self.queues, self._in_flight
        in_flight.repeatable = in_flight.same = None
        self._num_added = queues.num_added
        self._end_steps()
        if self.groups is not None:
            self.groups.begin_plan(queues.running, busy)
        queues.refresh()
        if queues.policy.preemptive and queues.waiting:
            self.admission.make_room(busy)
        started: list[RequestStart] = []
        new_pages: list[tuple[str, tuple[int, ...]]] = []
        decodes: list[tuple[Request, StepRow]] = []
        prefills: list[Request] = []
        complete = self._plan_decodes(decodes, new_pages, prefills, busy)
        num_decodes = len(decodes)
        budget = most = self.config.max_num_batched_tokens - num_decodes
        if most_tokens is not None and self.config.enable_chunked_prefill:
            # a request with a negative prompt starts with a token of each of its two sequences
            budget = min(budget, max(most_tokens - num_decodes, 2))
        if self._in_stages and self.config.enable_chunked_prefill:
            budget = min(budget, self._chunk_for_stages(prefills))
        num_drafts = 0
        if self.drafts is not None and decodes:
            room = budget // 2 if prefills or queues.waiting else budget
            if self.images is not None:
                room = min(room, most - self.images.most_joined(prefills))
            num_drafts = self._add_drafts(self.drafts, decodes, new_pages, room)
            budget -= num_drafts
        parts, joined, encoding = self._prompts.plan(
            prefills, budget, most - num_drafts, bool(decodes), may_start=complete
        )
        started += [sequence.start() for request in joined for sequence in request.sequences]
        self._begin_steps(num_decodes, parts)
        rows = decodes + [(sequence, _row(sequence, num)) for sequence, num in parts]
        if in_flight.batches and not (rows or new_pages or encoding):
            return None
        for request in queues.take_rewound():
            started += [sequence.start() for sequence in request.sequences]
        rows.sort(key=lambda part: part[1].num_scheduled_tokens > 1)  # of one token first
        if self.groups is not None:
            if joined or queues.num_added != self._num_looked:
                self._num_looked = queues.num_added
                self.prefixes.look_ahead(islice(queues.waiting, _LOOK_AHEAD))
            self.groups.plan_saves(rows)
        batch = self._launch(rows, started, new_pages, num_decodes, encoding)
        # a request with a negative prompt has two rows, so equal numbers may be a coincidence
        alone = 0 < num_decodes == len(queues.running) and not any(
            request.negative is not None for request in queues.running
        )
        others = busy or prefills or started
        if complete and alone and not others and not num_drafts:
            in_flight.repeatable = batch
        return batch.plan

    @property
    def _in_stages(self) -> bool:
        """Whether the batches in flight are in different stages of a pipeline."""
        return self.batches_in_flight > 1 and not self.min_concurrent_tokens

    def _chunk_for_stages(self, prefills: Sequence[Request]) -> int:
        """How many prompt tokens a step takes, so that all stages soon have some: while the first
        step is in the first stage the others wait, and while the last one is in the last stage.

        1,024 tokens in steps of 128 took two stages 1.60 s, in steps of 512 1.87 s.
        """
        steps = _STEPS_PER_STAGE * self.batches_in_flight
        enough = steps * self.config.max_num_batched_tokens
        tokens = 0
        for request in chain(prefills, self.queues.waiting):
            tokens += request.num_tokens - request.num_computed
            if tokens >= enough:
                break
        # two: a request with a negative prompt starts with a token of each of its two sequences
        return max(tokens // steps, self.config.short_step_tokens, 2)

    def _begin_steps(self, num_decodes: int, parts: Sequence[tuple[Request, int]]) -> None:
        """A step with this many decodes and these parts of prompts begins."""
        tokens = sum(num for _, num in parts)
        pairs = sum(num * (one.num_computed + num / 2) for one, num in parts)
        generated = self.committer.num_generation_tokens
        now = self.queues.clock()
        self.times.begin(now, self._num_steps, num_decodes, tokens, pairs, generated)

    def _launch(
        self,
        rows: list[tuple[Request, StepRow]],
        started: list[RequestStart],
        new_pages: list[tuple[str, tuple[int, ...]]],
        num_decodes: int,
        encoding: Encoding | None,
    ) -> Batch:
        """A batch, in flight from now on."""
        self._num_steps += 1
        self._step_id += 1
        self._num_tokens = sum(row.num_scheduled_tokens for _, row in rows)
        plan = StepPlan(
            self._step_id,
            tuple(row for _, row in rows),
            tuple(started),
            tuple(new_pages),
            tuple(self.queues.take_dropped()),
            self.pool.take_copies(),
            encoding=encoding,
        )
        if self.groups is not None:
            plan = self.groups.complete(plan)
        if self.tiered_pool is not None:
            plan = self._with_locations(plan, self.tiered_pool)
        each = [sequence for sequence, _ in rows]
        batch = Batch(plan, each, num_decodes, self.queues.clock())
        self._in_flight.batches.append(batch)
        return batch

    def _concurrent_tokens(self, busy: frozenset[Request]) -> int:
        """Tokens of prompts that could run next to the batches in flight.

        ``min_concurrent_tokens`` if a request waits to decode and none decodes in flight.
        """
        tokens, decoding = 0, self._in_flight.decoding
        for request in chain(self.queues.running, self.queues.waiting):
            if tokens >= self.min_concurrent_tokens:
                break
            if not busy.isdisjoint(request.sequences):
                continue
            if in_prefill(request):
                tokens += request.num_tokens - request.num_computed
            elif request.pages and not decoding:
                return self.min_concurrent_tokens
        return tokens

    def _with_locations(self, plan: StepPlan, tiered: TieredPagePool) -> StepPlan:
        """The plan with its pages' locations. Requests get events for pages that were recoded."""
        if lowered := tiered.take_recoded():
            now = self.queues.clock()
            for request in self.queues.running:
                pages = (page for one in request.sequences for page in one.pages)
                bits = Counter(lowered[page] for page in pages if page in lowered)
                for kind, count in bits.items():
                    request.note(RequestEvent(now, "recoded", num_pages=count, kv_bits=kind))
        return tiered.with_locations(plan)

    def _plan_again(self, last: Batch) -> Batch | None:
        """The rows of the last plan again. ``None``: a request may start, or pages are missing.

        While no request needs a page this is the same object: nothing is built or read row by row.
        """
        queues, in_flight = self.queues, self._in_flight
        if in_flight.batches:
            return None
        if queues.waiting.count and (  # len() would be a call in every step
            len(queues.running) < self.config.max_num_seqs
            or (
                queues.policy.preemptive
                and (queues.num_added != self._num_added or self._num_steps % _LOOK_EVERY == 0)
            )
        ):
            return None
        if in_flight.same is not None and not (in_flight.need_page or in_flight.need_save):
            in_flight.repeatable = in_flight.same
            return in_flight.same
        pages = self.pool.acquire((), len(in_flight.need_page))
        if pages is None:
            return None
        new_pages = []
        for request, page in zip(in_flight.need_page, pages, strict=True):
            request.pages.append(page)
            new_pages.append((request.request_id, (page,)))
        self._step_id += 1
        plan = StepPlan(self._step_id, last.plan.rows, new_pages=tuple(new_pages))
        if self.groups is not None:
            plan = self.groups.repeat(plan, in_flight.need_page, in_flight.need_save)
        plan = plan._replace(copies=self.pool.take_copies())  # also of evicted frames and states
        if self.tiered_pool is not None:
            plan = self._with_locations(plan, self.tiered_pool)
        batch = in_flight.repeatable = Batch(plan, last.sequences, last.num_decodes)
        if not (new_pages or plan.copies or plan.state_saves or plan.vacated):
            in_flight.same = batch
        return batch

    def _plan_decodes(
        self,
        decodes: list[tuple[Request, StepRow]],
        new_pages: list[tuple[str, tuple[int, ...]]],
        prefills: list[Request],
        busy: frozenset[Request],
    ) -> bool:
        """Give every running request that needs one token that token (in both sequences).

        Requests that need more go into ``prefills``. Returns whether all got the pages they need.
        """
        page_size, complete, running = self.config.page_size, True, self.queues.running
        most = self.config.max_num_seqs
        if self.min_concurrent_tokens and self._in_flight.decoding:
            most = 0
        elif self._in_stages:
            # an equal share for each batch
            slots = sum(len(r.sequences) for r in running if not in_prefill(r))
            most = max(-(-slots // self.batches_in_flight), 2)  # a negative prompt takes a slot too
        urgent = self._urgent_prompt(busy)
        for request in running:  # preemption shortens the list after this request
            if busy and not busy.isdisjoint(request.sequences):
                continue
            if in_prefill(request):
                prefills.append(request)
                continue
            if urgent is not None and self.queues.policy.overtakes(urgent, request):
                continue
            sequences = request.sequences
            if len(decodes) + len(sequences) > most:
                continue
            for sequence in sequences:
                if sequence.num_computed == len(sequence.pages) * page_size:
                    page = self._grow(sequence, request, busy)
                    if page is None:
                        complete = False  # the last in order waits for a page
                        break
                    new_pages.append((sequence.request_id, (page,)))
            else:
                for sequence in sequences:
                    if self.groups is not None:
                        self.groups.grow(sequence, 1)
                    decodes.append((sequence, _row(sequence, 1)))
        return complete

    def _urgent_prompt(self, busy: frozenset[Request]) -> Request | None:
        """A prompt for which the requests that it overtakes do not decode in this step. They do in
        every other step, so that no answer stops for the whole of a long prompt.
        """
        found = None
        if self.queues.policy.preemptive and not self._paused:
            free = (one for one in self.queues.running if busy.isdisjoint(one.sequences))
            found = next((one for one in free if one.urgent and in_prefill(one)), None)
        self._paused = found is not None
        return found

    def _add_drafts(
        self,
        drafts: Drafts,
        decodes: list[tuple[Request, StepRow]],
        new_pages: list[tuple[str, tuple[int, ...]]],
        budget: int,
    ) -> int:
        """Put drafts after the tokens that decode and have their pages. Returns how many."""
        left = budget
        if not drafts.choose([request for request, _ in decodes], budget, self._num_steps):
            return 0
        for index, (request, row) in enumerate(decodes):
            held = len(request.pages)
            found = drafts.take(request, left, self.pool)
            if found and (groups := self.groups) is not None:
                found = found[: groups.most_tokens(request, 1 + len(found)) - 1]
                found = found[: groups.most_drafts]
                groups.grow(request, 1 + len(found))
            if found:
                left -= len(found)
                num = 1 + len(found)
                row = row._replace(num_scheduled_tokens=num, num_output_rows=num, drafts=found)
                decodes[index] = request, row
            if len(request.pages) > held:
                new_pages.append((request.request_id, tuple(request.pages[held:])))
        return budget - left

    def _grow(self, sequence: Request, request: Request, busy: frozenset[Request]) -> int | None:
        """One more page for a sequence of ``request``, taken from the last in order if necessary.

        Requests in flight keep their pages.
        """
        while (pages := self.pool.acquire((), 1)) is None:
            last = self.queues.running[-1]
            if last is request or not busy.isdisjoint(last.sequences):
                return None
            self.queues.preempt_last()
        sequence.pages += pages
        return pages[0]

    def rewind(self, request: Request, num_tokens: int, forbidden: tuple[int, ...]) -> None:
        """See :meth:`RequestQueues.rewind`. The request may just have ended."""
        self.committer.num_generation_tokens -= request.num_tokens - num_tokens
        self.num_rewinds += 1
        self.queues.rewind(request, num_tokens, forbidden)
        if self.drafts is not None:
            self.drafts.rewind(request)

    def rollback(self) -> None:
        """Undo all steps in flight, because one of them was interrupted."""
        if self._in_flight:
            self.undo(*(batch.plan for batch in self._in_flight.batches))

    def undo(self, *plans: StepPlan) -> None:
        """``plans`` were interrupted: all running requests start over from their known tokens.

        How much of the plans the ranks did is unknown, so they will forget all of these requests.
        """
        self.queues.drop_again([name for plan in plans for name in plan.dropped])
        self.prefixes.undo([one for plan in plans for one in plan.copies])
        if self.images is not None:
            self.images.undo(plan.encoding for plan in plans)
        self._in_flight.batches.clear()
        self._in_flight.stop_repeating()
        while self.queues.running:
            self.queues.preempt_last(interrupted=True)

    def reset_prefix_cache(self) -> None:
        """Forget all cached and pinned prefixes. Running requests continue; their pages are no
        longer cached."""
        self.prefixes.reset()
        if self.drafts is not None:
            self.drafts.reset()
        for request in self.queues.running:
            for sequence in request.sequences:
                sequence.publishes = False

    def _lowest_tiers(self) -> dict[int, int]:
        if self.tiered_pool is None:
            return {}
        return lowest_tiers(self.queues.running, self.tiered_pool, self.config.kv_keep)

    def check(self) -> None:
        """Assert that queues, pages and counters agree (tests call it after every event)."""
        sequences = [one for request in self.queues.running for one in request.sequences]
        self.pool.check([*(one.pages for one in sequences), *self.prefixes.pins])
        self.prefixes.swap.check()
        self.prefixes.check_groups(sequences)
        self.queues.check()
        assert len(sequences) <= self.config.max_num_seqs, "too many requests run"
        for one in sequences:
            assert one.status is RequestStatus.RUNNING, "a running request is not marked so"
            held = len(one.pages) * self.config.page_size
            assert one.num_computed <= min(held, one.num_tokens - 1), "computed too much"
            assert one.num_tokens <= one.max_len, "a request is too long"
        assert set(self.prefixes.pending.values()) <= set(sequences), (
            "a prefix is promised by a request that does not run"
        )


def _row(sequence: Request, num_tokens: int) -> StepRow:
    """A row of known tokens, without drafts."""
    ends = sequence.num_computed + num_tokens == sequence.num_tokens
    outputs = 1 if ends and sequence.spec.kind == "generate" else 0
    return StepRow(sequence.request_id, num_tokens, outputs, (), sequence.adapter_slot)
