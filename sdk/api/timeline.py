"""What happened to one request, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from sdk.kernels.dataclass import dataclass

EventKind = Literal[
    "queued",
    "admitted",
    "prefill",
    "first_token",
    "preempted",
    "resumed",
    "swapped_in",
    "recoded",
    "omitted",
    "finished",
]
#: Events kept for one answer. A prompt of 100,000 tokens in chunks of 64 has 1,600.
MAX_EVENTS = 128


class RequestEvent(NamedTuple):
    """What happened to a request at time ``ts`` (see :class:`RequestMetrics`).

    ``queued``: the engine has the request; its prompt has ``num_tokens`` tokens. ``admitted``: it
    runs for the first time; ``num_tokens`` tokens came from the prefix cache. ``prefill``: a step
    of ``seconds``, begun at ``ts``, computed ``num_tokens`` tokens that were known before.
    ``first_token``: the first token of the answer was there. ``preempted``: it lost its pages when
    it had ``num_tokens`` tokens, prompt and answer. ``resumed``: it has pages again; ``num_tokens``
    tokens were cached and not computed again. ``swapped_in``: ``num_pages`` pages of ``kv_bits``
    bits were copied back from the swap space, of its prefix or of what it had before it was
    preempted. ``recoded``: ``num_pages`` of its pages moved to a lower tier of ``kv_policy`` and
    have ``kv_bits`` bits from then on. ``finished``: the answer has ``num_tokens`` tokens.
    ``omitted``: ``num_events`` events from ``ts`` on are not listed (see :data:`MAX_EVENTS`).

    ``answer``: the number of the answer it happened to, for a request with several.
    """

    ts: float
    kind: EventKind
    num_tokens: int = 0
    num_pages: int = 0
    kv_bits: int = 0
    seconds: float = 0.0
    answer: int = 0
    num_events: int = 0


class RequestMetrics(NamedTuple):
    """Times and counts of one request, and what happened to it (``events``, oldest first).

    All times are seconds of the engine's monotonic clock, so any two can be subtracted (in vLLM
    ``arrival_time`` is wall-clock time); ``None`` means not yet. For a request with several
    answers the times cover all of them, and the counts are totals. ``num_draft_tokens`` were
    verified (speculative decoding), and ``num_accepted_tokens`` of them became part of the answer.
    ``mask_seconds``: how long its steps waited for the masks of structured answers, after the model
    had run. ``events`` are those that :attr:`RequestOutput.timeline` shows, without ``queued``,
    ``first_token`` and ``finished``, whose times are fields here.
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    events: tuple[RequestEvent, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    finished_ts: float | None = None
    mask_seconds: float = 0.0


def with_event(events: tuple[RequestEvent, ...], event: RequestEvent) -> tuple[RequestEvent, ...]:
    """``events`` and one more. Beyond :data:`MAX_EVENTS` those in the middle are left out: how a
    request began and what happened last explain most.
    """
    if len(events) < MAX_EVENTS:
        return (*events, event)
    half = MAX_EVENTS // 2
    first = events[half]
    num = first.num_events + 1 if first.kind == "omitted" else 2  # that one, and the next
    omitted = RequestEvent(first.ts, "omitted", num_events=num)
    return (*events[:half], omitted, *events[half + 2 :], event)


def merged_events(answers: Sequence[tuple[RequestEvent, ...]]) -> tuple[RequestEvent, ...]:
    """The events of several answers in the order of time, each with the number of its answer."""
    numbered = (
        event._replace(answer=number) for number, events in enumerate(answers) for event in events
    )
    return tuple(sorted(numbered, key=attrgetter("ts")))


@dataclass(frozen=True, slots=True)
class Timeline:
    """What happened to one request, oldest first: iterable, and readable as text.

    ``str(timeline)`` has one line for each event, with milliseconds since the request arrived.
    """

    arrival_time: float
    events: tuple[RequestEvent, ...]
    #: How each answer ended so far, in the order of their indexes.
    finish_reasons: tuple[str | None, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    mask_seconds: float = 0.0

    @classmethod
    def of(
        cls,
        metrics: RequestMetrics,
        num_prompt_tokens: int,
        finish_reasons: Iterable[str | None] = (),
    ) -> Timeline:
        """The timeline of a request's metrics."""
        events = list(metrics.events)
        if metrics.first_token_ts is not None:
            first = RequestEvent(metrics.first_token_ts, "first_token")
            events.insert(_first_token_at(events, first.ts), first)
        if metrics.finished_ts is not None:
            tokens = metrics.num_generation_tokens
            events.append(RequestEvent(metrics.finished_ts, "finished", tokens))
        return cls(
            metrics.arrival_time,
            (RequestEvent(metrics.queued_ts, "queued", num_prompt_tokens), *events),
            tuple(finish_reasons),
            metrics.num_draft_tokens,
            metrics.num_accepted_tokens,
            metrics.mask_seconds,
        )

    def __iter__(self) -> Iterator[RequestEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __str__(self) -> str:
        several = len(self.finish_reasons) > 1
        lines = []
        for event in self.events:
            what = event.kind.replace("_", " ")
            if several and event.kind not in ("queued", "first_token", "finished"):
                what += f" (answer {event.answer})"
            since = 1000 * (event.ts - self.arrival_time)
            lines.append(f"{since:10.1f} ms  {what:<12} {self._details(event)}".rstrip())
        return "\n".join(lines)

    def _details(self, event: RequestEvent) -> str:
        tokens, pages = _count(event.num_tokens, "token"), _count(event.num_pages, "page")
        match event.kind:
            case "queued":
                return f"a prompt of {tokens}"
            case "admitted" | "resumed":
                return f"{tokens} from the cache"
            case "prefill":
                return f"{tokens} in {1000 * event.seconds:.1f} ms"
            case "preempted":
                return f"with {tokens}"
            case "swapped_in":
                return f"{pages} of {event.kv_bits} bits"
            case "recoded":
                return f"{pages} to {event.kv_bits} bits"
            case "omitted":
                return _count(event.num_events, "event")
            case "finished":
                return "; ".join(self._end(tokens))
        return ""

    def _end(self, tokens: str) -> list[str]:
        reasons = ", ".join(reason or "unfinished" for reason in self.finish_reasons)
        parts = [f"{reasons}: {tokens}" if reasons else tokens]
        if self.num_draft_tokens:
            parts.append(f"{self.num_accepted_tokens} of {self.num_draft_tokens} drafts accepted")
        if self.mask_seconds:
            parts.append(f"{1000 * self.mask_seconds:.1f} ms waiting for masks")
        return parts


def _first_token_at(events: Sequence[RequestEvent], moment: float) -> int:
    """Where the first token belongs among events of the same time: after what computed it."""
    place = 0
    for index, event in enumerate(events):
        computed = event.kind == "prefill" and event.ts + event.seconds <= moment
        if computed or event.ts < moment:
            place = index + 1
    return place


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
