"""The unfinished requests of an engine: which wait, which run, and how they come and go."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from sdk.engine.pages.prefixes import Prefixes
from sdk.engine.pages.tiered_pool import check_min_bits
from sdk.engine.plan import Pooled, Sampled
from sdk.engine.scheduling.in_flight import InFlightBatches
from sdk.engine.scheduling.negative_prompt import longest_answer
from sdk.engine.scheduling.policy import POLICIES
from sdk.engine.scheduling.request import NEGATIVE_SUFFIX, Request, RequestStatus
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.errors import RequestError
from sdk.outputs import FinishReason, RequestEvent

#: Queues are sorted by it: smaller runs first.
ORDER = attrgetter("order")


class RequestUpdate(NamedTuple):
    """What one step (or a deadline) changed for one request. ``request`` has its current state."""

    request: Request
    sampled: Sequence[Sampled] = ()
    prompt_logprobs: tuple[Sampled, ...] = ()
    hidden: Pooled | None = None


class RequestQueues:
    """Requests waiting and running, with their pages and deadlines. Not thread-safe.

    Requests may come and go while a step runs: what it computes for a request that has gone is
    ignored. ``waiting`` and ``running`` are sorted by ``Request.order``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefixes: Prefixes,
        in_flight: InFlightBatches,
        clock: Callable[[], float],
    ) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.clock = clock
        self._config = config
        self._prefixes = prefixes
        self._in_flight = in_flight
        self._policy = POLICIES[config.policy]
        self._requests: dict[str, Request] = {}  # unfinished, by id
        self._deadlines: list[tuple[float, int, Request]] = []  # heap
        self._dropped: list[str] = []  # the ranks must forget them
        self._expired: list[RequestUpdate] = []
        self._rewound: dict[Request, None] = {}  # the ranks must start them again
        self._num_added = 0

    @property
    def unfinished(self) -> Mapping[str, Request]:
        """Requests waiting and running, by id."""
        return self._requests

    @property
    def num_running(self) -> int:
        """Requests that hold pages (one with a negative prompt counts once)."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages, including preempted ones."""
        return len(self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. :raises RequestError: it could never run; the message says why."""
        self._check(request)
        self._limit_length(request)
        if not request.params.ignore_eos:
            request.stop_token_ids |= self._config.eos_token_ids
        request.queued_ts = self.clock()
        self._num_added += 1
        request.order = (self._policy(request), request.arrival_time, self._num_added)
        if request.params.deadline is not None:
            request.deadline = request.arrival_time + request.params.deadline
            if len(self._deadlines) > 2 * len(self._requests) + 64:  # mostly of finished requests
                self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, self._num_added, request))
        self._requests[request.request_id] = request
        insort(self.waiting, request, key=ORDER)

    def _check(self, request: Request) -> None:
        config, num_tokens = self._config, request.num_tokens
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already in use")
        if request.request_id.endswith(NEGATIVE_SUFFIX):
            raise RequestError(
                f"request id {request.request_id!r}: must not end in {NEGATIVE_SUFFIX!r}, which "
                "marks the sequences of negative prompts; use another id"
            )
        if num_tokens == 0:
            raise RequestError("the prompt is empty: at least one token is needed")
        answer = 1 if request.kind == "generate" else 0
        if num_tokens + answer > config.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; max_model_len is {config.max_model_len}"
                + (", and at least 1 must be left for the answer" if answer else "")
            )
        check_min_bits(request, config)

    def _limit_length(self, request: Request) -> None:
        """Set ``max_len`` of a request and of its negative sequence, if its prompt fits at all."""
        config, num_tokens, negative = self._config, request.num_tokens, request.negative
        available = self._prefixes.available_pages(request)
        num_pages = -(-num_tokens // config.page_size)
        if num_pages > available:
            pool, pinned = self._prefixes.pool, self._prefixes.num_pinned
            raise RequestError(
                f"the prompt needs {num_pages} KV pages of {config.page_size} tokens; "
                f"{available} are available in all"
                + (f": {pinned} of {pool.capacity} are pinned" if pinned else "")
            )
        # The pages hold one token less than is known: the last token is never read back.
        request.max_len = min(config.max_model_len, available * config.page_size + 1)
        if negative is not None:
            request.max_len = num_tokens + longest_answer(request, negative, config, available)
        if request.params.max_tokens is not None:
            request.max_len = min(request.max_len, num_tokens + request.params.max_tokens)
        if negative is not None:
            negative.max_len = negative.num_tokens + request.max_len - num_tokens
        grammar = request.resolved.grammar
        if grammar is not None and request.max_len - num_tokens < len(grammar.way):
            raise RequestError(
                f"structured_outputs: the shortest answer has {len(grammar.way)} tokens, and at "
                f"most {request.max_len - num_tokens} are left; raise max_tokens, or shorten the "
                "prompt"
            )

    def abort(self, request_id: str) -> Request | None:
        """End a request now, in whatever state it is; its pages are free at once.

        ``None``: there is no such request.
        """
        return self.finish(request_id, "abort")

    def finish(
        self, request_id: str, reason: FinishReason, stop_reason: int | str | None = None
    ) -> Request | None:
        """End a request for a reason found outside (a stop string, an error). None: not known."""
        request = self._requests.get(request_id)
        if request is not None:
            self.end(request, reason, stop_reason)
        return request

    def end(self, request: Request, reason: FinishReason, stop: int | str | None = None) -> None:
        """End an unfinished request."""
        if request.status is RequestStatus.RUNNING:
            self._remove(self.running, request)
            if reason in ("stop", "length"):  # after an error pages may hold NaN
                for sequence in request.sequences:
                    self._prefixes.keep_tail(sequence)
            self._release(request)
        else:
            self._remove(self.waiting, request)
        for sequence in request.sequences:
            sequence.status = RequestStatus(reason)
        request.stop_reason = stop
        del self._requests[request.request_id]

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        del queue[bisect_left(queue, request.order, key=ORDER)]

    def _release(self, request: Request) -> None:
        """Take the pages and pending prefixes of a running request; the ranks will forget it."""
        self._rewound.pop(request, None)
        for sequence in request.sequences:
            self._prefixes.release(sequence)
            self._dropped.append(sequence.request_id)
        self._in_flight.stop_repeating()

    def start(self, request: Request) -> None:
        """Run a request that was removed from ``waiting`` and has its pages."""
        for sequence in request.sequences:
            sequence.status = RequestStatus.RUNNING
        insort(self.running, request, key=ORDER)

    def preempt_last(self) -> None:
        """Send the last running request back to wait. It starts over from its known tokens."""
        request = self.running.pop()
        self._release(request)
        self._wait_again(request)

    def _wait_again(self, request: Request) -> None:
        """Queue a request that has lost its pages."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.note(RequestEvent(self.clock(), "preempted", request.num_tokens))
        for sequence in request.sequences:
            sequence.status = RequestStatus.PREEMPTED
            sequence.num_computed = 0  # the cache is searched again when it is admitted
        insort(self.waiting, request, key=ORDER)

    def rewind(self, request: Request, num_tokens: int, forbidden: tuple[int, ...]) -> None:
        """Between two steps: take back the tokens of a request after its first ``num_tokens``; the
        next one must be none of ``forbidden``.

        It goes on in the same pages. If some of these are shared by now, it starts over, as after a
        preemption. So does a request that ended with one of the tokens taken back.
        """
        removed = request.num_tokens - num_tokens
        request.forbidden = num_tokens, forbidden
        request.forced = ()
        stays = request.status is RequestStatus.RUNNING
        if stays and not all(
            self._prefixes.may_rewrite(one, one.num_tokens - removed) for one in request.sequences
        ):
            self._remove(self.running, request)
            self._release(request)
            stays = False
        for sequence in request.sequences:
            del sequence.token_ids[sequence.num_tokens - removed :]
            sequence.num_computed = min(sequence.num_computed, sequence.num_tokens - 1)
            self._prefixes.forget_keys(sequence)
        if stays:
            self._dropped += [sequence.request_id for sequence in request.sequences]
            self._rewound[request] = None
            self._in_flight.stop_repeating()
            return
        request.stop_reason, request.is_complete = None, False
        self._requests[request.request_id] = request
        self._wait_again(request)

    def expire(self) -> None:
        """End the requests whose deadline has passed; :meth:`take_expired` reports them."""
        if not self._deadlines:
            return
        now = self.clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if not request.finished:
                self.end(request, "deadline")
                self._expired.append(RequestUpdate(request))

    def take_expired(self) -> list[RequestUpdate]:
        """Updates of the requests that expired since the last call."""
        updates, self._expired = self._expired, []
        return updates

    def take_dropped(self) -> list[str]:
        """Ids of the sequences that the ranks must forget, since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_rewound(self) -> list[Request]:
        """The running requests that the ranks must start again, since the last call."""
        rewound, self._rewound = self._rewound, {}
        return list(rewound)

    def drop_again(self, request_ids: Sequence[str]) -> None:
        """The plan with these dropped sequences was undone: the next plan must name them again."""
        self._dropped = [*request_ids, *self._dropped]

    def check(self) -> None:
        """Assert that the queues agree (tests)."""
        queued = self.waiting + self.running
        assert {r.request_id: r for r in queued} == self._requests, "a request is lost or twice"
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=ORDER), "a queue is out of order"
        for request in self.waiting:
            for one in request.sequences:
                assert not one.pages and not one.num_computed, "a waiting request holds KV"
        for request in queued:
            if request.negative is not None:
                answers = request.output_token_ids, request.negative.output_token_ids
                assert answers[0] == answers[1], "a negative sequence has another answer"
        assert all(math.isfinite(moment) for moment, _, _ in self._deadlines)
