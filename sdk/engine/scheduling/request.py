"""One request as the scheduler sees it: token ids, counters, pages and a status. No tensors.

There is no stored phase. What a request needs next follows from two counters: ``num_computed``
tokens have their keys and values in ``pages``, and ``len(token_ids)`` tokens are known. Prefill,
chunked prefill, a prefix hit and decode differ only in the distance between the two. A request
samples in the step after which they are equal. Only ``Scheduler`` changes these fields.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace

from sdk.api.outputs import FinishReason
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.api.timeline import RequestEvent, with_event
from sdk.engine.job import Job
from sdk.engine.pages.frames import Held
from sdk.engine.pages.image_keys import key_ids, placed
from sdk.engine.pages.page_pool import PageKey, page_key
from sdk.engine.pages.states import WorkingState
from sdk.engine.plan import Frames, RequestStart, SequenceSpec
from sdk.engine.scheduling.results import ResultReservation
from sdk.models.vision.image import PromptImage

_NEGATIVE_PARAMS = SamplingParams()

#: The id of a negative sequence is its request's id with this suffix.
NEGATIVE_SUFFIX = "~negative"


class RequestStatus(enum.Enum):
    """A request's state. The last five are final; their values are the public finish reasons."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"


_FINISHED: dict[RequestStatus, FinishReason] = {
    RequestStatus.STOP: "stop",
    RequestStatus.LENGTH: "length",
    RequestStatus.ABORT: "abort",
    RequestStatus.ERROR: "error",
    RequestStatus.DEADLINE: "deadline",
}


def is_watched(params: SamplingParams) -> bool:
    """Whether an answer must be updated at every token, not only at its end."""
    return (
        params.output_kind is not RequestOutputKind.FINAL_ONLY
        or params.logprobs is not None
        or bool(params.stop or params.stop_regex or params.banned_strings)
    )


class Request:
    """One generation (one of the ``n`` answers a caller asked for) or one embedding.

    With a ``guidance_scale`` it has a second sequence with its own pages, ``negative``: the
    negative prompt (default: the last prompt token) and the same answer. The two are queued,
    admitted, preempted and ended together; queues contain the request, never its negative sequence.

    ``arrival_time`` orders requests (first come, first served). ``deadline`` is a time of the
    scheduler's clock or infinity. If a request is not ``watched`` (:func:`is_watched`), steps
    report only its end, not each token.
    """

    __slots__ = (
        "adapter",
        "adapter_name",
        "adapter_slot",
        "arrival_time",
        "closed",
        "deadline",
        "events",
        "first_token_ts",
        "forbidden",
        "forced",
        "is_complete",
        "is_drafted",
        "job",
        "key_prompt",
        "keys",
        "last_token_ts",
        "mask_seconds",
        "max_len",
        "min_available",
        "mirostat_mu",
        "negative",
        "num_accepted_tokens",
        "num_cached",
        "num_certain",
        "num_computed",
        "num_draft_tokens",
        "num_preemptions",
        "num_prompt_scored",
        "num_prompt_tokens",
        "num_published",
        "num_reported",
        "order",
        "pages",
        "params",
        "position",
        "priority",
        "publishes",
        "queue",
        "queued_ts",
        "request_id",
        "results",
        "scheduled_ts",
        "spec",
        "state",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "turn_ends",
        "urgent",
        "waits_for",
        "watched",
        "windows",
    )

    def __init__(self, job: Job, spec: SequenceSpec | None = None) -> None:
        """``spec``: of this answer, if the job has several (default: that of the job)."""
        self.job = job
        self.spec = spec = job.spec if spec is None else spec
        if spec.images:  # ranks get the tiles once, to encode them
            self.spec = replace(spec, images=tuple(map(_without_tiles, spec.images)))
        self.request_id, self.params = spec.request_id, spec.params
        self.priority = self.params.priority if job.priority is None else job.priority
        self.arrival_time = job.arrival_time or 0.0
        self.adapter = None if job.adapter is None else job.adapter.key
        self.adapter_name: str | None = None  # for metrics
        self.adapter_slot = -1  # of the adapter on the ranks, while the request runs
        self.watched = is_watched(self.params)
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.results: ResultReservation | None = None  # shared by the answers of one call
        self.negative = self._make_negative()
        self.token_ids = list(job.prompt_token_ids)  # prompt, then output
        self.num_prompt_tokens = len(self.token_ids)
        # The prompt's ids in keys, if they are not its token ids.
        self.key_prompt = key_ids(self.token_ids, placed(spec.images)) if spec.images else None
        self.num_computed = 0
        self.num_cached: int | None = None  # the first prefix hit; a preemption does not change it
        self.num_prompt_scored = 0  # prompt_logprobs reported so far
        self.num_preemptions = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.mirostat_mu: float | None = None  # as of the last committed token
        self.pages: list[int] = []
        # What it holds besides pages while it runs: frames by window group, the slots of its state.
        self.windows: list[Held] = []
        self.state: WorkingState | None = None
        self.keys: list[PageKey] = []  # of its full pages, as far as they were needed
        self.num_published, self.publishes = 0, False  # leading pages that are published already
        self.num_certain = sys.maxsize  # tokens that no rewind takes back: only these are published
        # After a rewind: a number of known tokens, and tokens that must not follow them.
        self.forbidden: tuple[int, tuple[int, ...]] | None = None
        self._init_place()
        self.max_len = 0  # it finishes with "length" at this many tokens
        self.stop_token_ids = frozenset(self.params.stop_token_ids or ())
        self.closed = False  # its structure was, because few tokens were left
        self.is_complete = False  # its structure is, so its last token is text
        self.is_drafted = True  # unless the ranks cannot draft for it
        self.forced: Sequence[int] = ()  # the next tokens, if its structure leaves no choice
        self.deadline = math.inf
        # Why it was not admitted last time, so that the next plan need not search again.
        self.min_available = 0
        self.waits_for: bytes | None = None
        self.queued_ts = self.mask_seconds = 0.0
        self.scheduled_ts: float | None = None
        self.first_token_ts: float | None = None
        self.last_token_ts: float | None = None
        self.events: tuple[RequestEvent, ...] = ()  # shared with the outputs, so never changed

    def _init_place(self) -> None:
        """Its place among the requests, which ``RequestQueues`` sets."""
        self.queue: Hashable = None  # of the policy
        self.order: tuple[float, float, int] = (0, 0.0, 0)  # in its queue: smaller runs first
        self.urgent = False  # it arrived ahead of a running one
        # Of a running request: the position of its queue, and from how many computed tokens on one
        # that waits may preempt it.
        self.position: tuple[float, ...] = ()
        self.turn_ends = 0
        self.num_reported = 0  # the most tokens that the policy knows to have run or been cached

    def _make_negative(self) -> Request | None:
        job, spec = self.job, self.spec
        if self.params.guidance_scale == 1.0 or spec.kind != "generate" or spec.negative_of:
            return None
        prompt = job.negative_prompt_token_ids
        if prompt is None:
            prompt = job.prompt_token_ids[-1:]
        negative = SequenceSpec(
            spec.request_id + NEGATIVE_SUFFIX, _NEGATIVE_PARAMS, negative_of=spec.request_id
        )
        return Request(replace(job, spec=negative, prompt_token_ids=prompt))

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_computed} of "
            f"{self.num_tokens} tokens computed, {len(self.pages)} pages)"
        )

    @property
    def sequences(self) -> tuple[Request, ...]:
        """The request itself, and its negative sequence if it has one."""
        return (self,) if self.negative is None else (self, self.negative)

    @property
    def tenant(self) -> str | None:
        """Who it is for."""
        return self.params.tenant

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        """Whether the request has ended and will never run again."""
        return self.status in _FINISHED

    @property
    def finish_reason(self) -> FinishReason | None:
        """``stop``, ``length``, ``abort``, ``error``, ``deadline``; ``None`` while unfinished."""
        return _FINISHED.get(self.status)

    @property
    def scores_prompt(self) -> bool:
        """True while prompt logprobs are missing: they need the logits of every prompt position."""
        return (
            self.params.prompt_logprobs is not None
            and self.num_prompt_scored < self.num_prompt_tokens - 1
        )

    @property
    def takes_drafts(self) -> bool:
        """False if a token changes more than the next token (guidance, mirostat's target), if a
        caller's logits processor would see drafts that are wrong, or if the ranks cannot draft.
        """
        params = self.params
        guided = self.negative is not None or self.spec.negative_of is not None
        excluded = guided or params.mirostat_mode or params.logits_processors
        return self.spec.kind == "generate" and not excluded and self.is_drafted

    @property
    def uses_prefix_cache(self) -> bool:
        """False if every position must run: for prompt logprobs and embeddings (which may pool)."""
        if self.spec.kind == "embed":
            return self.spec.pooling is not None and self.spec.pooling.reuse_prefix
        return not self.scores_prompt

    @property
    def _forbidden_next(self) -> tuple[int, ...]:
        """Tokens that must not come next, because a banned string began with them."""
        if self.forbidden is None or self.forbidden[0] != len(self.token_ids):
            return ()
        return self.forbidden[1]

    def note(self, *events: RequestEvent) -> None:
        """Add events to the request's timeline, which is bounded."""
        for event in events:
            self.events = with_event(self.events, event)

    def start(self) -> RequestStart:
        """What ranks that do not know the request need to run it."""
        return RequestStart(
            self.spec,
            tuple(self.token_ids),
            self.num_prompt_tokens,
            self.num_computed,
            tuple(self.pages),
            self.max_len,
            self.mirostat_mu,
            self._forbidden_next,
            tuple(
                Frames(group, held.first, tuple(held.frames))
                for group, held in enumerate(self.windows)
            ),
            () if self.state is None else tuple(self.state.slots),
            -1 if self.state is None else self.state.initial,
        )

    def key_ids(self, begin: int, end: int) -> list[int]:
        """The ids in keys of tokens ``begin`` to ``end``: see ``image_keys.py``."""
        if self.key_prompt is None:
            return self.token_ids[begin:end]
        known = self.key_prompt[begin:end]
        return known + self.token_ids[max(begin, self.num_prompt_tokens) : end]

    def extend_keys(self, root: bytes, page_size: int, num_pages: int) -> None:
        """Compute the chained keys of the first ``num_pages`` pages, all of them full."""
        keys = self.keys
        parent = keys[-1].digest if keys else root
        for start in range(len(keys) * page_size, num_pages * page_size, page_size):
            key = page_key(parent, self.key_ids(start, start + page_size))
            keys.append(key)
            parent = key.digest


def _without_tiles(one: PromptImage) -> PromptImage:
    return one._replace(image=one.image._replace(tiles=()))
