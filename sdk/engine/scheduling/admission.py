"""Which waiting requests start in a step, and the memory that their results may take."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sdk.api.outputs import RequestEvent
from sdk.engine.pages.groups import Groups
from sdk.engine.pages.prefixes import Prefix, Prefixes
from sdk.engine.recorder import MetricsRecorder
from sdk.engine.scheduling.images import Images
from sdk.engine.scheduling.negative_prompt import share
from sdk.engine.scheduling.queues import RequestQueues
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.results import ResultReservation
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.kernels.dataclass import dataclass

if TYPE_CHECKING:
    from sdk.engine.scheduling.adapter_slots import AdapterSlots


@dataclass(slots=True)
class PromptBudget:
    """The tokens of prompts that a step may still run: ``tokens`` in all, ``scoring`` of them
    scored (``prompt_logprobs``), and ``patient`` of requests that are not urgent."""

    tokens: int
    scoring: int
    patient: int = sys.maxsize
    #: What a step may run at most, where it must run more than it should.
    hard: int = 0

    def most(self, request: Request) -> int:
        """How many of them ``request`` may run."""
        most = self.tokens
        if request.scores_prompt:
            most = min(most, self.scoring)
        if not request.urgent:
            most = min(most, self.patient)
        return most

    def take(self, request: Request, num_tokens: int) -> None:
        """``request`` runs this many. With an urgent one no others run, which would delay it."""
        self.tokens = max(self.tokens - num_tokens, 0)
        self.hard -= num_tokens
        if request.scores_prompt:
            self.scoring -= num_tokens
        if self.patient < sys.maxsize:
            self.patient = 0 if request.urgent else self.patient - num_tokens


def tokens_of(
    request: Request, budget: PromptBudget, images: Images | None, groups: Groups | None
) -> int:
    """How many tokens of a started prompt run next: within the budget, up to an image that has no
    rows yet, and as far as there are frames for them."""
    most = budget.most(request)
    if images is not None and most and request.spec.images:
        most = images.most_tokens(request, most, budget.hard)
        images.touch(request)
    if most and groups is not None:
        fits = groups.most_tokens(request, most)
        if images is not None and fits < most and request.spec.images:
            fits = images.most_tokens(request, fits, fits)
        most = fits
    return most


class Admission:
    """Starts waiting requests, in order, with pages for all their known tokens or not at all.

    A request starts only if one page stays available for each running request that may still need
    one, so that the next decode does not preempt it. A request whose longest answer fits the pages
    it holds counts for none: ``max_num_seqs`` requests of full length run in exactly the pages they
    fill. No request overtakes the first waiting one, except in these cases. A request whose next
    page is about to be published by a running request waits for that page instead of computing it
    again: this is how ``n`` answers share a prompt, and how a batch with one system prompt computes
    it once. And a request waits while there is no memory for its log-probabilities, or while its
    adapter is in no slot (``adapter_slots.py``).

    If the policy says that the first waiting request overtakes running ones, :meth:`make_room`
    preempts as many of those as it needs slots and pages.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        prefixes: Prefixes,
        recorder: MetricsRecorder,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._config = config
        #: Of a model that sees images.
        self.images: Images | None = None
        self._queues = queues
        self._prefixes = prefixes
        self._recorder = recorder
        self._adapters = adapters
        self.reserved_bytes = 0  # for the results of started requests

    def admit(
        self, budget: PromptBudget, now: float, ahead_of: Request | None = None
    ) -> Iterator[tuple[Request, list[tuple[Request, int]]]]:
        """Start waiting requests in order, within the ``budget`` and the free slots and pages.

        Yields each started request with the scheduled tokens of each of its sequences.
        ``ahead_of``: only those that overtake this running request.
        """
        queues, blocked = self._queues, False
        spare, slots = self._spare(), self._slots()
        pool, adapters, groups = self._prefixes.pool, self._adapters, self._prefixes.groups
        if adapters is not None:
            adapters.begin_pass()
        for request in queues.waiting:
            if not budget.tokens:
                return
            if ahead_of is not None and not queues.policy.overtakes(request, ahead_of):
                return
            sequences = request.sequences
            lacks_memory = self._lacks_result_memory(request, blocked)
            if lacks_memory or (request.scores_prompt and not budget.scoring):
                blocked |= lacks_memory
                continue
            if adapters is not None and not adapters.may_start(request):
                continue
            most = budget.most(request)
            slots += len(sequences)  # a request that waits for a prefix keeps its slot
            if slots > self._config.max_num_seqs or len(sequences) > most:
                return
            if self._prefixes.awaits(request):
                continue
            if (
                pool.num_available < request.min_available + spare
                and not pool.on_shortage
                and groups is None  # it may lack frames or slots
            ):
                return
            found = [self._prefixes.find(sequence) for sequence in sequences]
            request.waits_for = next((one.waits_for for one in sequences if one.waits_for), None)
            if request.waits_for is not None:
                continue
            num_computed = found[0].num_tokens(self._config.page_size)
            num = request.num_tokens - num_computed
            if num > most and not self._config.enable_chunked_prefill:
                return
            request.min_available = self._prefixes.acquire(request, found, spare)
            if request.min_available and any(prefix.tail is not None for prefix in found):
                # it takes a page more
                found = [self._prefixes.find(sequence, tails=False) for sequence in sequences]
                num_computed = found[0].num_tokens(self._config.page_size)
                request.min_available = self._prefixes.acquire(request, found, spare)
            if request.min_available:
                return  # asking again is pointless with fewer
            queues.waiting.remove(request)
            self._start(request, found, num_computed, now)
            spare += self._may_grow(request)
            most = tokens_of(request, budget, self.images, groups)
            shares = share(request, most) if most else []
            num = sum(num for _, num in shares)
            if groups is not None:
                for sequence, count in shares:
                    groups.grow(sequence, count)
            budget.take(request, num)
            queues.will_run(request, num)
            yield request, shares

    def _spare(self) -> int:
        """Pages that stay available for the running requests."""
        return sum(map(self._may_grow, self._queues.running))

    def _slots(self) -> int:
        """Slots taken by the running requests."""
        return sum(len(request.sequences) for request in self._queues.running)

    def make_room(self, busy: frozenset[Request]) -> None:
        """Preempt running requests for the first waiting one, as far as it overtakes them: the last
        in order first, none of the ``busy`` ones, and none if that would not be enough.
        """
        queues = self._queues
        first = queues.waiting.first() if queues.running else None
        if (
            first is None
            or self._prefixes.awaits(first)
            or self._lacks_result_memory(first, False)
            or not (self._adapters is None or self._adapters.is_ready(first))
        ):
            return
        while True:
            victims = [
                request
                for request in reversed(queues.running)
                if queues.may_preempt(first, request) and busy.isdisjoint(request.sequences)
            ]
            if not victims:
                return
            slots = self._slots() + len(first.sequences) - self._config.max_num_seqs
            pages = self._missing_pages(first)
            if slots <= 0 and pages <= 0:
                return
            sequences = [sequence for request in victims for sequence in request.sequences]
            held = sum(self._prefixes.num_held(one) for one in sequences)
            if len(sequences) < slots or held < pages:
                return
            queues.preempt(victims[0])

    def _missing_pages(self, request: Request) -> int:
        """The pages that a waiting request lacks now; at most 0 if it can start, or waits for a
        prefix."""
        prefixes = self._prefixes
        found = [prefixes.find(sequence) for sequence in request.sequences]
        if any(sequence.waits_for for sequence in request.sequences):
            return 0
        size = self._config.page_size
        needed = sum(-(-one.num_tokens // size) for one in request.sequences)
        hits = sum(len(prefix.pages) for prefix in found)
        if prefixes.groups is not None:
            return prefixes.missing_pages(request, found, needed - hits + self._spare())
        return (
            max(needed - hits, request.min_available) + self._spare() - prefixes.pool.num_available
        )

    def _start(self, request: Request, found: list[Prefix], num_computed: int, now: float) -> None:
        if request.results is not None and not request.results.active:
            request.results.active = True
            self.reserved_bytes += request.results.nbytes
        self._queues.start(request)
        if request.num_cached is None:
            request.num_cached = num_computed
            request.scheduled_ts = now
            request.note(RequestEvent(now, "admitted", num_computed))
            self._recorder.admitted(request, num_computed, now)
        else:
            request.note(RequestEvent(now, "resumed", num_computed))
        request.note(*self._swapped_in(found, now))

    def _swapped_in(self, found: list[Prefix], now: float) -> tuple[RequestEvent, ...]:
        """One event for each KV type among the pages that came back from the swap space."""
        swap, bits = self._prefixes.swap, self._config.kv_bits
        counts = Counter(swap.tier(key) for prefix in found for key in prefix.swapped)
        return tuple(
            RequestEvent(now, "swapped_in", num_pages=count, kv_bits=bits[tier])
            for tier, count in counts.items()
        )

    def _may_grow(self, request: Request) -> int:
        """How many of its sequences need more pages than they hold for the longest answer."""
        if request.spec.kind == "embed":
            return 0
        size = self._config.page_size
        # the last token of an answer is never read back: its KV is not stored
        return sum(len(one.pages) * size < one.max_len - 1 for one in request.sequences)

    def _lacks_result_memory(self, request: Request, blocked: bool) -> bool:
        """Whether there is no memory for a request's results, or an earlier one waits for it."""
        results = request.results
        if results is None or results.active:
            return False
        return blocked or self.reserved_bytes + results.nbytes > self._config.max_result_bytes

    def release_results(self, results: ResultReservation) -> None:
        """The caller has the results of a request, or will never take them."""
        if results.active:
            results.active = False
            self.reserved_bytes -= results.nbytes
