"""The unfinished requests of an engine: which wait, which run, and how they come and go."""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from sdk.api.errors import RequestError
from sdk.api.logprobs import Sampled
from sdk.api.outputs import FinishReason, RequestEvent
from sdk.api.scheduling_policy import make_policy
from sdk.engine.pages.prefixes import Prefixes
from sdk.engine.pages.tiered_pool import check_min_bits
from sdk.engine.plan import Pooled
from sdk.engine.scheduling.in_flight import InFlightBatches
from sdk.engine.scheduling.negative_prompt import longest_answer
from sdk.engine.scheduling.request import NEGATIVE_SUFFIX, Request, RequestStatus
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.engine.scheduling.waiting import WaitingRequests

if TYPE_CHECKING:
    from sdk.engine.scheduling.adapter_slots import AdapterSlots

#: ``running`` is sorted by it: the last one is preempted first.
_RUNNING_ORDER = attrgetter("position", "order")
#: A request runs at least this many new tokens before one that waits preempts it, and at least a
#: page, because full pages stay in the cache: so it never loses more than it computed in its turn.
_QUANTUM = 16
_LAST_ANSWERS = 128


class RequestUpdate(NamedTuple):
    """What one step (or a deadline) changed for one request. ``request`` has its current state."""

    request: Request
    sampled: Sequence[Sampled] = ()
    prompt_logprobs: tuple[Sampled, ...] = ()
    hidden: Pooled | None = None


class RequestQueues:
    """Requests waiting and running, with their pages and deadlines. Not thread-safe.

    Requests may come and go while a step runs: what it computes for a request that has gone is
    ignored. ``waiting`` yields requests in the policy's order, ``running`` is sorted by it as of
    the last :meth:`refresh`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        prefixes: Prefixes,
        in_flight: InFlightBatches,
        clock: Callable[[], float],
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.policy = policy = make_policy(
            config.policy, config.tenant_weights, config.priority_aging
        )
        self.waiting = WaitingRequests(policy)
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.clock = clock
        self._config = config
        self._prefixes = prefixes
        self._in_flight = in_flight
        self._adapters = adapters
        self._requests: dict[str, Request] = {}  # unfinished, by id
        self._deadlines: list[tuple[float, int, Request]] = []  # heap
        self._dropped: list[str] = []  # the ranks must forget them
        self._expired: list[RequestUpdate] = []
        self._rewound: dict[Request, None] = {}  # the ranks must start them again
        self.num_added = 0
        #: Tokens of the answers that ended last.
        self.answer_lengths: deque[int] = deque(maxlen=_LAST_ANSWERS)
        #: When the last request arrived that overtakes a running one.
        self.overtaken_at = -math.inf
        self._quantum = max(_QUANTUM, config.page_size)

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
        if self._adapters is not None and (adapter := request.job.adapter) is not None:
            self._adapters.attach(adapter)
            request.adapter_name = adapter.name
        if not request.params.ignore_eos:
            request.stop_token_ids |= self._config.eos_token_ids
        request.queued_ts = self.clock()
        self._place(request)
        if request.params.deadline is not None:
            request.deadline = request.arrival_time + request.params.deadline
            if len(self._deadlines) > 2 * len(self._requests) + 64:  # mostly of finished requests
                self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline, self.num_added, request))
        self._requests[request.request_id] = request
        self._join(request)
        if self.policy.preemptive and self.running:
            request.urgent = self.policy.overtakes(request, self.running[-1])
            if request.urgent:
                self.overtaken_at = request.queued_ts

    def _place(self, request: Request) -> None:
        """Ask the policy for the place of a new request."""
        self.num_added += 1
        order = float(self.policy.order(request))
        request.order = (order, request.arrival_time, self.num_added)
        request.queue = self.policy.queue(request)
        hash(request.queue)  # raises here, where it fails only this request

    def _join(self, request: Request) -> None:
        """A request that is new, or had ended, waits from now on."""
        if self.policy.dynamic:
            self._charge()  # a policy compares the newcomer with the others
        self.policy.added(request)
        self.waiting.add(request)

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
        answer = 1 if request.spec.kind == "generate" else 0
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
        grammar = request.spec.resolved.grammar
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
            self._stop(request)
            if reason in ("stop", "length") or (
                reason != "error" and self._has_states
            ):  # after an error pages may hold NaN
                self._keep_tails(request)
            self._release(request)
        else:
            self.waiting.remove(request)
        for sequence in request.sequences:
            sequence.status = RequestStatus(reason)
        request.stop_reason = stop
        del self._requests[request.request_id]
        self.policy.ended(request)
        if request.spec.kind == "generate" and reason in ("stop", "length"):
            self.answer_lengths.append(request.num_output_tokens)
        if self._adapters is not None:
            self._adapters.detach(request)

    @property
    def _has_states(self) -> bool:
        return self._config.states is not None

    def _keep_tails(self, request: Request) -> None:
        """Keep the ends of what a request has computed. Not of one in flight with its recurrent
        state: that has read more tokens than are committed."""
        if self._has_states and any(
            request in batch.sequences or request.negative in batch.sequences
            for batch in self._in_flight.batches
        ):
            return
        for sequence in request.sequences:
            # A request may end while its step is committed, before the row of its negative
            # sequence is: the state of that has read a token more than is counted.
            if not (self._has_states and sequence.spec.negative_of is not None):
                self._prefixes.keep_tail(sequence)

    def _stop(self, request: Request) -> None:
        """Remove a request from the running ones."""
        self.running.remove(request)
        if self.policy.dynamic:
            self._report(request, 0)
        self.policy.stopped(request)

    def _charge(self) -> None:
        """Tell the policy which tokens ran since it was told last."""
        for request in self.running:
            if request.num_computed > request.num_reported or request.negative is not None:
                self._report(request, 0)

    def _report(self, request: Request, planned: int) -> None:
        """The same for one request, and for ``planned`` tokens that its first sequence will run."""
        prompt = answer = 0
        for sequence in request.sequences:
            begin, end = sequence.num_reported, sequence.num_computed + planned
            planned = 0
            if end > begin:
                sequence.num_reported = end
                of_prompt = max(min(end, sequence.num_prompt_tokens) - begin, 0)
                prompt, answer = prompt + of_prompt, answer + end - begin - of_prompt
        if prompt or answer:
            self.policy.ran(request, prompt, answer)

    def refresh(self) -> None:
        """Sort ``running`` by the positions of the policy's queues as they are now."""
        policy = self.policy
        if not policy.dynamic:
            return
        self._charge()
        positions = {}
        for request in self.running:
            name = request.queue
            if name not in positions:
                positions[name] = policy.position(name)
            request.position = positions[name]
        self.running.sort(key=_RUNNING_ORDER)

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether ``running`` may lose its place to ``waiting`` now."""
        return running.num_computed >= running.turn_ends and self.policy.overtakes(waiting, running)

    def _release(self, request: Request) -> None:
        """Take the pages and pending prefixes of a running request; the ranks will forget it."""
        self._rewound.pop(request, None)
        if self._adapters is not None:
            self._adapters.release(request)
        for sequence in request.sequences:
            self._prefixes.release(sequence)
            self._dropped.append(sequence.request_id)
        self._in_flight.stop_repeating()

    def start(self, request: Request) -> None:
        """Run a request that was removed from ``waiting`` and has its pages."""
        if self._adapters is not None:
            self._adapters.start(request)
        for sequence in request.sequences:
            sequence.status = RequestStatus.RUNNING
            # tokens found in the cache, and those that ran before a preemption, are not reported
            sequence.num_reported = max(sequence.num_reported, sequence.num_computed)
        request.turn_ends = request.num_reported + self._quantum
        request.position = self.policy.position(request.queue)
        insort(self.running, request, key=_RUNNING_ORDER)
        self.policy.started(request)

    def will_run(self, request: Request, num_tokens: int) -> None:
        """A request that was just started runs this many tokens in this step: its queue's position
        takes them into account before the next request is chosen."""
        if self.policy.dynamic:
            self._report(request, num_tokens)

    def preempt(self, request: Request, *, interrupted: bool = False) -> None:
        """Send a running request back to wait. It starts over from its known tokens.

        ``interrupted``: in a step, so its recurrent state may be that of any token.
        """
        self._stop(request)
        if self._has_states and not interrupted:
            self._keep_tails(request)
        self._release(request)
        self._wait_again(request)

    def preempt_last(self, *, interrupted: bool = False) -> None:
        """:meth:`preempt` the last running request."""
        self.preempt(self.running[-1], interrupted=interrupted)

    def _wait_again(self, request: Request) -> None:
        """Queue a request that has lost its pages."""
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.note(RequestEvent(self.clock(), "preempted", request.num_tokens))
        for sequence in request.sequences:
            sequence.status = RequestStatus.PREEMPTED
            sequence.num_computed = 0  # the cache is searched again when it is admitted
        self.waiting.add(request)

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
            self._stop(request)
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
        request.stop_reason, request.is_complete, request.closed = None, False, False
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            self.policy.added(request)
        if self._adapters is not None:
            self._adapters.reattach(request)
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
        queued = [*self.waiting, *self.running]
        assert len(queued) == len(self._requests), "a request is lost or twice"
        assert {r.request_id: r for r in queued} == self._requests, "a request is lost or twice"
        self.waiting.check()
        in_order = sorted(self.running, key=_RUNNING_ORDER)
        assert self.running == in_order, "the running requests are out of order"
        for request in self.waiting:
            for one in request.sequences:
                assert not one.pages and not one.num_computed, "a waiting request holds KV"
        for request in queued:
            if request.negative is not None:
                answers = request.output_token_ids, request.negative.output_token_ids
                assert answers[0] == answers[1], "a negative sequence has another answer"
        assert all(math.isfinite(moment) for moment, _, _ in self._deadlines)
