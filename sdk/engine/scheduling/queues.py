"""The unfinished requests of an engine: who waits, who runs, and how they come and go."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from sdk.engine.pages.ladder_pool import LadderPool, check_floor, held_pages
from sdk.engine.pages.page_pool import PagePool
from sdk.engine.pages.prefixes import Prefixes
from sdk.engine.plan import Sampled, StepPlan
from sdk.engine.scheduling.guides import longest_answer
from sdk.engine.scheduling.request import GUIDE_SUFFIX, Request, RequestStatus
from sdk.engine.scheduling.results import ResultRoom
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.errors import RequestError
from sdk.outputs import FinishReason, RequestEvent

#: Queues are sorted by it: smaller runs first.
ORDER = attrgetter("order")


class Batch(NamedTuple):
    """A plan and the sequence that each of its rows belongs to."""

    plan: StepPlan
    sequences: Sequence[Request]
    #: How many of the rows continue an answer, with one token or with drafts behind it.
    num_decodes: int = 0


class RequestUpdate(NamedTuple):
    """What one step (or a deadline) changed for one request; ``request`` is its state now."""

    request: Request
    sampled: Sequence[Sampled] = ()
    prompt_logprobs: tuple[Sampled, ...] = ()
    hidden: list[float] | None = None


class Queues:
    """Requests waiting and running, with their pages and deadlines. Not thread-safe.

    Requests may come and go while a step runs: what it computes for one that is gone is ignored.
    """

    def __init__(
        self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.ladder: LadderPool | None = None
        pages = config.num_pages, config.page_size, config.enable_prefix_caching
        if len(config.kv_bits) > 1:
            self.ladder = LadderPool(*pages, config.first_pages, config.kv_bits, self._lowest)
        self.pool = self.ladder or PagePool(*pages, limit=config.first_pages)
        self.prefixes = Prefixes(self.pool, config.kv_type, config.num_swap_pages, self.ladder)
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.clock = clock
        self._requests: dict[str, Request] = {}  # unfinished, by id
        self._waiting: list[Request] = []  # both sorted by Request.order
        self._running: list[Request] = []
        self._deadlines: list[tuple[float, int, Request]] = []  # heap
        self._dropped: list[str] = []  # the ranks are to forget them
        self._expired: list[RequestUpdate] = []
        self._num_added = 0
        self._result_bytes = 0  # held by requests that were started
        self._launched: deque[Batch] = deque()  # planned and not committed, oldest first
        # The last batch, where it was all that runs, one token each, and nobody came or went since:
        self._steady: Batch | None = None
        self._full: list[Request] = []  # of these, who needs a page for the next step

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
        check_floor(request, config)
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
        insort(self._waiting, request, key=ORDER)

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

    def shorten(self, request: Request, num_tokens: int) -> None:
        """Drop the tokens of a finished request behind the one that ended it."""
        self.num_generation_tokens -= len(request.token_ids) - num_tokens
        del request.token_ids[num_tokens:]

    def _end(self, request: Request, reason: FinishReason, stop: int | str | None = None) -> None:
        if request.status is RequestStatus.RUNNING:
            self._remove(self._running, request)
            self._release(request)
        else:
            self._remove(self._waiting, request)
        for sequence in request.sequences:
            sequence.status = RequestStatus(reason)
        request.stop_reason = stop
        del self._requests[request.request_id]

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        del queue[bisect_left(queue, request.order, key=ORDER)]

    def _release(self, request: Request) -> None:
        """Take pages and promises from a running request, and have the ranks forget it."""
        for sequence in request.sequences:
            self.prefixes.release(sequence)
            self._dropped.append(sequence.request_id)
        self._steady, self._full = None, []

    def _preempt(self, request: Request) -> None:
        """Send a request that was just taken out of the running ones back to wait."""
        self._release(request)
        for sequence in request.sequences:
            sequence.status = RequestStatus.PREEMPTED
            sequence.num_computed = 0  # what the cache has is looked up again on admission
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.events += (RequestEvent(self.clock(), "preempted", num_tokens=request.num_tokens),)
        insort(self._waiting, request, key=ORDER)

    def _expire(self, now: float) -> None:
        """End the requests whose deadline has passed; the next commit reports them."""
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.finished:
                self._end(request, "deadline")
                self._expired.append(RequestUpdate(request))

    def release_results(self, room: ResultRoom) -> None:
        """The caller of a request has its results, or never will."""
        if room.held:
            room.held = False
            self._result_bytes -= room.nbytes

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

    def _lowest(self) -> dict[int, int]:
        keep = self.config.kv_keep
        return {} if self.ladder is None else held_pages(self._running, self.ladder, keep)
