"""Spans of requests, as the SDK's in-memory exporter gets them."""

from __future__ import annotations

import asyncio
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from sdk import AsyncLLM, EngineDeadError, RequestError, SamplingParams
from sdk.requests.driving.opentelemetry import instrument
from sdk.testing import FakeAnswer, FakeLLM

KNOWN = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


@pytest.fixture
def llm(provider):
    with FakeLLM("one two three") as made, instrument(made, provider):
        yield made


def test_a_span_says_what_was_asked_and_what_came(llm, exporter):
    params = SamplingParams(
        max_tokens=2, temperature=0.5, top_p=0.9, top_k=20, seed=7, stop=["END"], tenant="acme"
    )
    begin = time.time_ns()
    [output] = llm.generate(["hello there"], params, use_tqdm=False)
    [span] = exporter.get_finished_spans()
    assert span.name == "text_completion fake" and span.kind is SpanKind.INTERNAL
    assert span.status.status_code is StatusCode.UNSET and span.parent is None
    found = dict(span.attributes)
    assert found.pop("embedlm.queue_time") >= 0
    assert found.pop("gen_ai.response.time_to_first_chunk") > 0
    assert found == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "embedlm",
        "gen_ai.request.model": "fake",
        "gen_ai.response.id": output.request_id,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 20,
        "gen_ai.request.max_tokens": 2,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ("END",),
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "embedlm.tenant": "acme",
    }
    assert {name for name in found if name.startswith("gen_ai.")} <= KNOWN
    assert [event.name for event in span.events] == [
        *("queued", "admitted", "prefill", "first_token", "finished")
    ]
    moments = [event.timestamp for event in span.events]
    slack = 50_000_000  # the two clocks are read one after the other
    assert begin - slack <= moments[0] <= moments[-1] <= time.time_ns() + slack
    assert moments == sorted(moments)


def test_the_caller_s_span_is_the_parent_in_every_kind_of_call(llm, provider, exporter):
    tracer = provider.get_tracer("test")

    async def ask():
        with tracer.start_as_current_span("task") as parent:
            await asyncio.gather(llm.agenerate("a"), llm.agenerate("b"))
            async for _ in llm.astream("c"):
                pass
            return parent.get_span_context().span_id

    parents = {asyncio.run(ask()): 3}
    with tracer.start_as_current_span("thread") as parent:
        llm.generate("d", use_tqdm=False)
        list(llm.stream("e"))
        llm.enqueue("f")
        llm.wait_for_completion()
        llm.embed(["g"], use_tqdm=False)
        parents[parent.get_span_context().span_id] = 4
    found = [span for span in exporter.get_finished_spans() if span.parent is not None]
    counts = {one: sum(span.parent.span_id == one for span in found) for one in parents}
    assert counts == parents
    assert [span.name for span in found].count("embeddings fake") == 1


def test_several_answers_have_one_span(provider, exporter):
    answers = iter(["short", "a longer answer", "x"])
    with FakeLLM(lambda prompt: next(answers)) as llm, instrument(llm, provider):
        list(llm.stream("a", SamplingParams(n=3, max_tokens=3)))
    [span] = exporter.get_finished_spans()
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop", "length", "stop")


def test_a_stream_that_is_left_ends_its_span(llm, exporter):
    stream = llm.stream("a", SamplingParams(max_tokens=1000, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("b", use_tqdm=False)
    spans = {span.attributes["gen_ai.response.finish_reasons"] for span in wait_for(exporter, 2)}
    assert spans == {("abort",), ("stop",)}


def wait_for(exporter, count):
    end = time.monotonic() + 60
    while len(exporter.get_finished_spans()) < count:
        assert time.monotonic() < end
        time.sleep(0.001)
    return exporter.get_finished_spans()


def test_an_answer_that_fails_has_an_error(provider, exporter):
    answer = FakeAnswer("x", error=ValueError("no logits"))
    with FakeLLM(answer) as llm, instrument(llm, provider):
        llm.generate("a", use_tqdm=False)
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert "no logits" in span.status.description
    assert span.attributes["error.type"] == "RequestError"


def test_a_dead_engine_ends_all_spans(provider, exporter):
    llm = FakeLLM(errors={1: EngineDeadError("lost")})
    with instrument(llm, provider), pytest.raises(EngineDeadError):
        llm.generate(["a", "b"], use_tqdm=False)
    llm.close()
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    assert all(span.status.status_code is StatusCode.ERROR for span in spans)


def test_close_ends_the_spans_of_waiting_requests(provider, exporter):
    llm = FakeLLM()
    instrument(llm, provider)
    llm.enqueue(["a", "b"])
    llm.close()
    spans = exporter.get_finished_spans()
    assert [span.attributes["error.type"] for span in spans] == ["EngineClosedError"] * 2


def test_a_rejected_request_has_no_span(llm, exporter):
    with pytest.raises(RequestError):
        llm.generate("", use_tqdm=False)
    llm.enqueue("a", request_id="same")
    with pytest.raises(RequestError, match="not collected yet"):
        llm.enqueue("b", request_id="same")
    llm.wait_for_completion()
    assert len(exporter.get_finished_spans()) == 1


def test_after_stop_there_are_no_spans_and_it_can_begin_again(provider, exporter):
    with FakeLLM() as llm:
        with instrument(llm, provider, model_name="mine"):
            with pytest.raises(RequestError, match="instrumented already"):
                instrument(llm, provider)
            llm.generate("a", use_tqdm=False)
        llm.generate("b", use_tqdm=False)
        with instrument(AsyncLLM(llm), provider):
            llm.generate("c", use_tqdm=False)
    assert [span.name for span in exporter.get_finished_spans()] == [
        "text_completion mine",
        "text_completion fake",
    ]


def test_a_processor_that_raises_harms_no_request(provider, caplog):
    class Broken(SimpleSpanProcessor):
        def on_end(self, span):
            raise ZeroDivisionError("exporter")

    provider.add_span_processor(Broken(InMemorySpanExporter()))
    with FakeLLM("fine") as llm, instrument(llm, provider):
        assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == "fine"
        assert llm.generate("b", use_tqdm=False)[0].outputs[0].text == "fine"


def test_a_tracer_that_raises_harms_no_request(caplog):
    class Broken(TracerProvider):
        def get_tracer(self, *args, **kwargs):
            class Tracer:
                def start_span(self, *args, **kwargs):
                    raise ZeroDivisionError("tracer")

            return Tracer()

    with FakeLLM("fine") as llm, instrument(llm, Broken()):
        assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == "fine"
    assert "no spans for 1 requests" in caplog.text


def test_what_is_no_llm_is_refused():
    with pytest.raises(RequestError, match="instrument: expected an LLM, found 5"):
        instrument(5)


def test_without_an_sdk_in_the_host_nothing_is_recorded():
    with FakeLLM("fine") as llm, instrument(llm):
        assert llm.generate("a", use_tqdm=False)[0].outputs[0].text == "fine"
