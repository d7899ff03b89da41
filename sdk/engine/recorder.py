"""Counts what an engine does. The scheduler and the engine call it from the thread that steps."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping

from sdk.api.outputs import FinishReason
from sdk.engine.scheduling.request import Request
from sdk.metrics.histogram import SECONDS, TOKENS, Histogram
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats, RequestStats

#: Tenants, and adapters, that are counted separately: each takes 15 KB.
MAX_LABELS = 64
OTHER = "(other)"
#: Rates are of the last ten seconds.
WINDOW_S = 10
_RATES = (
    *("prompt_tokens_per_second", "generation_tokens_per_second", "requests_per_second"),
    "goodput",
)
_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error", "deadline")


class RequestSeries:
    """See :class:`RequestStats`, which is a snapshot of it."""

    __slots__ = (
        "decode_time",
        "e2e",
        "finished",
        "generation_tokens",
        "inference_time",
        "num_added",
        "num_judged",
        "num_within_slo",
        "prefill_time",
        "prompt_tokens",
        "queue_time",
        "tpot",
        "ttft",
    )

    def __init__(self) -> None:
        self.ttft, self.queue_time, self.prefill_time = Histogram(), Histogram(), Histogram()
        self.decode_time, self.inference_time = Histogram(), Histogram()
        self.tpot, self.e2e = Histogram(), Histogram()
        self.prompt_tokens, self.generation_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.finished: dict[str, int] = dict.fromkeys(_REASONS, 0)
        self.num_added = self.num_within_slo = self.num_judged = 0

    def read(self) -> RequestStats:
        """A snapshot."""
        finished = dict(self.finished)
        return RequestStats(
            ttft=self.ttft.read(),
            queue_time=self.queue_time.read(),
            prefill_time=self.prefill_time.read(),
            decode_time=self.decode_time.read(),
            inference_time=self.inference_time.read(),
            tpot=self.tpot.read(),
            e2e=self.e2e.read(),
            prompt_tokens=self.prompt_tokens.read(),
            generation_tokens=self.generation_tokens.read(),
            finished=finished,
            num_unfinished=self.num_added - sum(finished.values()),
            num_within_slo=self.num_within_slo,
            num_judged=self.num_judged,
        )


class Rates:
    """Counters at the end of each of the last seconds in which something happened."""

    def __init__(self, now: float) -> None:
        self._begun = now
        #: The end of the second that is counted: :meth:`roll` is due from then on.
        self.ends = float(int(now) + 1)
        self._past: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=WINDOW_S + 2)

    def roll(self, now: float, *counters: int) -> None:
        """A second has ended with these ``counters``; a step of another second has run."""
        self._past.append((self.ends, counters))
        self.ends = float(int(now) + 1)

    def read(self, now: float, *counters: int) -> tuple[float, ...]:
        """The growth of each of ``counters`` per second: over the last ten seconds, of which the
        present one is not over yet, or since the engine was built."""
        begin = float(int(now) + 1 - WINDOW_S)
        before = (0,) * len(counters)
        for ended, known in list(self._past):
            if ended <= begin:
                before = known
        if self.ends <= begin:  # nothing has run since
            before = counters
        seconds = now - max(begin, self._begun)
        if seconds <= 0:
            return (0.0,) * len(counters)
        return tuple((a - b) / seconds for a, b in zip(counters, before, strict=True))


class MetricsRecorder:
    """Histograms of requests and steps. One thread records; any thread may read.

    A step calls :meth:`step` once; everything else happens once for each request. So the times
    between tokens cost nothing for each token: requests that decoded in the same two steps have the
    same one.
    """

    def __init__(self, now: float) -> None:
        self.rates = Rates(now)
        self.requests = RequestSeries()
        self.by_tenant: dict[str, RequestSeries] = {}
        self.by_adapter: dict[str, RequestSeries] = {}
        self.inter_token_latency = Histogram()
        self.step_seconds = Histogram()
        self.step_tokens = Histogram(TOKENS)
        self.longest_answer = Histogram(TOKENS)
        #: Prompt tokens of admitted requests, those of them found in the cache, and prompt tokens
        #: of requests that have their first token: what vLLM counts under these names.
        self.num_queried_tokens = self.num_hit_tokens = self.num_prompt_tokens = 0
        self.slo: SLO | None = None

    def read(self, metrics: Mapping[str, float]) -> EngineStats:
        """A snapshot; ``metrics``: the flat numbers of the same moment."""
        return EngineStats(
            metrics=dict(metrics),
            requests=self.requests.read(),
            by_tenant=_read(self.by_tenant),
            by_adapter=_read(self.by_adapter),
            inter_token_latency=self.inter_token_latency.read(),
            step_seconds=self.step_seconds.read(),
            step_tokens=self.step_tokens.read(),
            longest_answer=self.longest_answer.read(),
            slo=self.slo,
        )

    # Steps

    def step(self, seconds: float, tokens: int, interval: float, answers: int) -> None:
        """A step of ``tokens`` was committed; ``answers`` got their last token ``interval`` ago."""
        histogram = self.step_seconds
        histogram.counts[bisect_left(SECONDS, seconds)] += 1
        histogram.sum += seconds
        histogram = self.step_tokens
        histogram.counts[bisect_left(TOKENS, tokens)] += 1
        histogram.sum += tokens
        if answers:
            histogram = self.inter_token_latency
            histogram.counts[bisect_left(SECONDS, interval)] += answers
            histogram.sum += interval * answers

    def roll(self, now: float, num_computed: int, num_generated: int) -> None:
        """The first step of a second is about to be committed; prompt tokens computed and tokens
        generated before it."""
        self.rates.roll(now, *self._counters(num_computed, num_generated))

    def read_rates(self, now: float, num_computed: int, num_generated: int) -> dict[str, float]:
        """Prompt tokens computed, tokens generated, answers and good answers per second."""
        found = self.rates.read(now, *self._counters(num_computed, num_generated))
        return dict(zip(_RATES, found, strict=True))

    def _counters(self, num_computed: int, num_generated: int) -> tuple[int, ...]:
        """What :data:`_RATES` are the rates of."""
        requests = self.requests
        num_finished = sum(requests.finished.values())
        return num_computed, num_generated, num_finished, requests.num_within_slo

    # Requests

    def added(self, request: Request) -> None:
        """A request was queued."""
        for series in self._series(request):
            series.num_added += 1

    def admitted(self, request: Request, num_cached: int, now: float) -> None:
        """A request runs for the first time."""
        self.num_queried_tokens += request.num_tokens
        self.num_hit_tokens += num_cached
        for series in self._series(request):
            series.queue_time.add(now - request.queued_ts)

    def first_token(self, request: Request, now: float) -> None:
        """A request has its first token."""
        self.num_prompt_tokens += request.num_prompt_tokens
        for series in self._series(request):
            series.ttft.add(now - request.arrival_time)

    def finished(self, request: Request, reason: FinishReason, now: float) -> None:
        """An answer has ended; its tokens are final."""
        first, last = request.first_token_ts, request.last_token_ts
        tokens, e2e = request.num_output_tokens, now - request.arrival_time
        tpot = None
        if first is not None and last is not None and tokens > 1:
            tpot = (last - first) / (tokens - 1)
        ttft = None if first is None else first - request.arrival_time
        is_good = (
            self.slo is not None
            and reason in ("stop", "length")
            and self.slo.is_met(ttft, tpot, e2e)
        )
        for series in self._series(request):
            series.finished[reason] += 1
            series.num_judged += self.slo is not None
            series.num_within_slo += is_good
            series.e2e.add(e2e)
            series.prompt_tokens.add(request.num_prompt_tokens)
            if request.spec.kind == "generate":
                series.generation_tokens.add(tokens)
            if tpot is not None:
                series.tpot.add(tpot)
            if request.scheduled_ts is None:
                continue
            begun = request.scheduled_ts
            if first is not None and last is not None:
                series.prefill_time.add(first - begun)
                series.decode_time.add(last - first)
                series.inference_time.add(last - begun)
            elif request.spec.kind == "embed" and reason == "stop":
                series.prefill_time.add(now - begun)
                series.inference_time.add(now - begun)

    def _series(self, request: Request) -> tuple[RequestSeries, ...]:
        """What a request counts in."""
        tenant, adapter = request.params.tenant, request.adapter_name
        if tenant is None and adapter is None:
            return (self.requests,)
        found = [self.requests]
        for name, labels in ((tenant, self.by_tenant), (adapter, self.by_adapter)):
            if name is not None:
                if name not in labels and len(labels) >= MAX_LABELS:
                    name = OTHER
                if name not in labels:
                    labels[name] = RequestSeries()
                found.append(labels[name])
        return tuple(found)


def _read(labels: Mapping[str, RequestSeries]) -> Mapping[str, RequestStats]:
    """Snapshots by label; the thread that steps may add labels meanwhile."""
    return {name: series.read() for name, series in list(labels.items())}
