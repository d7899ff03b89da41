"""Which waiting requests start in a step, and the memory that their results may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sdk.engine.pages.prefixes import Prefix, Prefixes
from sdk.engine.scheduling.negative_prompt import share
from sdk.engine.scheduling.queues import RequestQueues
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.results import ResultReservation
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.metrics.recorder import Recorder
from sdk.outputs import RequestEvent


class Admission:
    """Starts waiting requests, in order, with pages for all their known tokens or not at all.

    A request starts only if one page stays available for each running request that may still need
    one, so that the next decode does not preempt it. A request whose longest answer fits the pages
    it holds counts for none: ``max_num_seqs`` requests of full length run in exactly the pages they
    fill. No request overtakes the oldest waiting one, except in two cases. A request whose next
    page is about to be published by a running request waits for that page instead of computing it
    again: this is how ``n`` answers share a prompt, and how a batch with one system prompt computes
    it once. And a request waits while there is no memory for its log-probabilities.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        queues: RequestQueues,
        prefixes: Prefixes,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._queues = queues
        self._prefixes = prefixes
        self._recorder = recorder
        self.reserved_bytes = 0  # for the results of started requests

    def admit(
        self, budget: int, scoring: int, now: float
    ) -> Iterator[tuple[Request, list[tuple[Request, int]]]]:
        """Start waiting requests in order, within ``budget`` tokens and the free slots and pages.

        Yields each started request with the scheduled tokens of each of its sequences. ``scoring``:
        the prompt tokens that may be scored in this step.
        """
        waiting, index, blocked = self._queues.waiting, 0, False
        spare = sum(map(self._may_grow, self._queues.running))
        slots = sum(len(request.sequences) for request in self._queues.running)
        pool = self._prefixes.pool
        while budget and index < len(waiting):
            request = waiting[index]
            sequences = request.sequences
            lacks_memory = self._lacks_result_memory(request, blocked)
            if lacks_memory or (request.scores_prompt and not scoring):
                blocked |= lacks_memory
                index += 1
                continue
            slots += len(sequences)  # a request that waits for a prefix keeps its slot
            if slots > self._config.max_num_seqs or len(sequences) > budget:
                return
            if request.waits_for in self._prefixes.pending:
                index += 1
                continue
            if pool.num_available < request.min_available + spare and not pool.on_shortage:
                return
            found = [self._prefixes.find(sequence) for sequence in sequences]
            request.waits_for = next((one.waits_for for one in sequences if one.waits_for), None)
            if request.waits_for is not None:
                index += 1
                continue
            num_computed = found[0].num_tokens(self._config.page_size)
            num = request.num_tokens - num_computed
            if num > budget and not self._config.enable_chunked_prefill:
                return
            request.min_available = self._prefixes.acquire(request, found, spare)
            if request.min_available and any(prefix.tail is not None for prefix in found):
                found = [prefix._replace(tail=None) for prefix in found]  # it takes a page more
                num_computed = found[0].num_tokens(self._config.page_size)
                request.min_available = self._prefixes.acquire(request, found, spare)
            if request.min_available:
                return  # asking again is pointless with fewer
            del waiting[index]
            self._start(request, found, num_computed, now)
            spare += self._may_grow(request)
            scored = request.scores_prompt
            shares = share(request, min(budget, scoring) if scored else budget)
            num = sum(num for _, num in shares)
            budget -= num
            scoring -= num if scored else 0
            yield request, shares

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
        if request.kind == "embed":
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
