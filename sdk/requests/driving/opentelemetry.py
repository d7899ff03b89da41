"""Spans of requests, through OpenTelemetry's API only (extra ``metrics``).

Attributes follow the semantic conventions for generative AI; those that have none are named
``embedlm.*``. Without an SDK in the host, the API records nothing. Prompts and answers are never
recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.outputs import RequestOutput
from sdk.api.timeline import RequestEvent
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.kernels.packages import missing
from sdk.requests.driving.driver import Driver
from sdk.requests.driving.job_driver import OutputSink

try:
    from opentelemetry import context as otel_context, trace
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider
except ImportError as error:
    raise missing(error, "sdk.requests.driving.opentelemetry needs") from error

logger = logging.getLogger("sdk")
_PROVIDER = "embedlm"
_OPERATIONS = {"generate": "text_completion", "embed": "embeddings"}


def instrument(
    llm: Any, tracer_provider: TracerProvider | None = None, *, model_name: str | None = None
) -> Instrumentation:
    """Record a span for each request of ``llm`` from now on.

    A span is a child of the caller's current span, in whichever thread or task it asks. It ends
    when the request does; ``tracer_provider`` (default: the global one) says what becomes of it.
    Processors run in the engine's thread, so use one that exports in the background, such as the
    SDK's ``BatchSpanProcessor``. ``model_name`` (default: what the model was loaded from) is the
    value of ``gen_ai.request.model``. ``Instrumentation.stop()`` ends it; it is also a context
    manager.

    :raises RequestError: ``llm`` is not an ``LLM``, or is instrumented already.
    """
    driver = getattr(getattr(llm, "llm", llm), "_driver", None)  # of an AsyncLLM too
    if not isinstance(driver, Driver):
        raise RequestError(f"instrument: expected an LLM, found {llm!r:.80}")
    if driver.tap is not None:
        raise RequestError("instrument: this LLM is instrumented already; stop() that first")
    from sdk import __version__

    tracer = trace.get_tracer("embedlm", __version__, tracer_provider)
    name = model_name or str(getattr(getattr(llm, "llm", llm).config, "model", "model"))
    return Instrumentation(driver, tracer, name)


class Instrumentation:
    """See :func:`instrument`."""

    def __init__(self, driver: Driver, tracer: Tracer, model_name: str) -> None:
        self._driver = driver
        self._tracer = tracer
        self._model_name = model_name
        driver.tap = self._submitted

    def __enter__(self) -> Instrumentation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Record no more requests. Those that run still end their spans."""
        if self._driver.tap == self._submitted:
            self._driver.tap = None

    def _submitted(self, jobs: Sequence[Job], sink: OutputSink) -> OutputSink:
        """Begin the spans of requests, in the thread of their caller."""
        try:
            context = otel_context.get_current()
            clock = self._driver.engine.scheduler.queues.clock
            spans = {}
            for job in jobs:
                operation = _OPERATIONS[job.spec.kind]
                span = self._tracer.start_span(
                    f"{operation} {self._model_name}",
                    context,
                    SpanKind.INTERNAL,
                    dict(_request_attributes(job, operation, self._model_name)),
                )
                spans[job.request_id] = span
            return _SpanSink(sink, spans, clock)
        except Exception:
            logger.warning("no spans for %d requests", len(jobs), exc_info=True)
            return sink


class _SpanSink:
    """Ends spans with what their requests' last outputs say, and passes all outputs on."""

    def __init__(
        self, sink: OutputSink, spans: dict[str, Span], clock: Callable[[], float]
    ) -> None:
        self._sink = sink
        self._spans = spans  # of unfinished requests
        self._clock = clock
        self._reasons: dict[str, dict[int, str]] = {}  # of answers that ended before the last one

    def deliver(self, output: Output) -> bool:
        """See :class:`OutputSink`."""
        taken = self._sink.deliver(output)
        try:
            self._note(output, taken)
        except Exception:
            logger.warning("the span of request %s is lost", output.request_id, exc_info=True)
        return taken

    def fail(self, request_id: str, error: Exception) -> None:
        """See :class:`OutputSink`."""
        self._sink.fail(request_id, error)
        try:
            if (span := self._spans.pop(request_id, None)) is not None:
                span.record_exception(error)
                _end_with_error(span, type(error).__name__, str(error))
        except Exception:
            logger.warning("the span of request %s is lost", request_id, exc_info=True)

    def _note(self, output: Output, taken: bool) -> None:
        request_id = output.request_id
        if isinstance(output, RequestOutput):
            for answer in output.outputs:
                if answer.finish_reason is not None:
                    ended = self._reasons.setdefault(request_id, {})
                    ended[answer.index] = answer.finish_reason
        if taken and not output.finished:
            return
        span = self._spans.pop(request_id, None)
        found = self._reasons.pop(request_id, {})
        if span is None:
            return
        reasons = [reason for _, reason in sorted(found.items())]
        if not taken and not output.finished:
            reasons = ["abort"]  # its caller has gone
        if not isinstance(output, RequestOutput):
            reasons = ["stop"]
        span.set_attributes(dict(_response_attributes(output, reasons)))
        offset = time.time() - self._clock()
        for event in output.timeline or ():
            when = int((event.ts + offset) * 1e9)
            span.add_event(event.kind, dict(_event_attributes(event)), when)
        if "error" in reasons and isinstance(output, RequestOutput):
            problems = [str(a.stop_reason) for a in output.outputs if a.finish_reason == "error"]
            _end_with_error(span, "RequestError", "; ".join(problems))
        else:
            span.end()


def _end_with_error(span: Span, kind: str, message: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
    span.end()


def _request_attributes(job: Job, operation: str, model: str) -> Iterator[tuple[str, Any]]:
    params = job.params
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", _PROVIDER
    yield "gen_ai.request.model", model
    yield "gen_ai.response.id", job.request_id
    if params.tenant is not None:
        yield "embedlm.tenant", params.tenant
    if job.spec.kind != "generate":
        return
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    if params.top_k > 0:
        yield "gen_ai.request.top_k", params.top_k
    if params.num_answers > 1:
        yield "gen_ai.request.choice.count", params.num_answers
    for name in ("max_tokens", "seed", "frequency_penalty", "presence_penalty"):
        if value := getattr(params, name):
            yield f"gen_ai.request.{name}", value
    if params.stop:
        yield "gen_ai.request.stop_sequences", list(params.stop)


def _response_attributes(output: Output, reasons: Sequence[str]) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.response.finish_reasons", list(reasons)
    yield "gen_ai.usage.input_tokens", len(output.prompt_token_ids)
    metrics = output.metrics
    if metrics is None:
        return
    cached = getattr(output, "num_cached_tokens", None)
    if cached is not None:
        yield "gen_ai.usage.cache_read.input_tokens", cached
    if isinstance(output, RequestOutput):
        yield "gen_ai.usage.output_tokens", metrics.num_generation_tokens
    if metrics.scheduled_ts is not None:
        yield "embedlm.queue_time", metrics.scheduled_ts - metrics.queued_ts
    if metrics.first_token_ts is not None:
        ttft = metrics.first_token_ts - metrics.arrival_time
        yield "gen_ai.response.time_to_first_chunk", ttft
    if metrics.num_preemptions:
        yield "embedlm.num_preemptions", metrics.num_preemptions
    if metrics.num_draft_tokens:
        yield "embedlm.num_draft_tokens", metrics.num_draft_tokens
        yield "embedlm.num_accepted_tokens", metrics.num_accepted_tokens


def _event_attributes(event: RequestEvent) -> Iterator[tuple[str, Any]]:
    for name in event._fields[2:]:
        if value := getattr(event, name):
            yield f"embedlm.{name}", value
