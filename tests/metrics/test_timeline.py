"""What a request's outputs tell of what happened to it, and when."""

from __future__ import annotations

import pytest

from sdk import ClassificationOutput, PoolingRequestOutput, RequestEvent, SamplingParams
from sdk.api.outputs import PoolingOutput
from sdk.api.timeline import MAX_EVENTS, RequestMetrics, Timeline, with_event
from sdk.testing import FakeLLM, ManualClock


@pytest.fixture
def llm():
    clock = ManualClock(50.0)
    times = {"seconds_per_token": 0.01, "seconds_to_first_token": 0.1}
    with FakeLLM("one two three", clock=clock, sleep=clock.sleep, **times) as made:
        yield made


def test_a_quiet_request_in_words(llm):
    [output] = llm.generate("hello there", use_tqdm=False)
    assert str(output.timeline).split("\n") == [
        "       0.0 ms  queued       a prompt of 2 tokens",
        "       0.0 ms  admitted     0 tokens from the cache",
        "       0.0 ms  prefill      2 tokens in 110.0 ms",
        "     110.0 ms  first token",
        "     140.0 ms  finished     stop: 4 tokens",
    ]


def test_the_same_as_data(llm):
    [output] = llm.generate("hello there", use_tqdm=False)
    timeline = output.timeline
    assert timeline.arrival_time == 50.0 and len(timeline) == 5
    assert [event.kind for event in timeline] == [
        *("queued", "admitted", "prefill", "first_token", "finished")
    ]
    assert [round(event.ts - 50.0, 6) for event in timeline] == [0, 0, 0, 0.11, 0.14]
    assert timeline.finish_reasons == ("stop",)
    assert output.metrics.finished_ts == pytest.approx(50.14)


def test_a_stream_shows_what_has_happened_so_far(llm):
    pieces = llm.stream("hello")
    first = next(pieces)
    assert [event.kind for event in first.timeline] == [
        *("queued", "admitted", "prefill", "first_token")
    ]
    *_, last = pieces
    assert last.timeline.events[-1].kind == "finished"


def test_a_preempted_request_tells_so(llm):
    llm.enqueue("hello there", SamplingParams(max_tokens=3))
    llm.step()
    llm._driver.between_steps(llm._driver.engine.scheduler.queues.preempt_last)
    [output] = llm.wait_for_completion()
    kinds = [event.kind for event in output.timeline]
    assert kinds == [
        *("queued", "admitted", "prefill", "first_token", "preempted"),
        *("resumed", "prefill", "finished"),
    ]
    lines = str(output.timeline).split("\n")
    assert lines[4].endswith("preempted    with 3 tokens")
    assert lines[6].endswith("prefill      3 tokens in 110.0 ms")


def test_several_answers_are_told_apart(llm):
    [output] = llm.generate("hello", SamplingParams(n=2), use_tqdm=False)
    admitted = [event for event in output.timeline if event.kind == "admitted"]
    assert [event.answer for event in admitted] == [0, 1]
    lines = str(output.timeline).split("\n")
    assert sum("admitted (answer 1)" in line for line in lines) == 1
    assert lines[-1].endswith("stop, stop: 8 tokens")


def test_a_prompt_in_chunks_has_one_event_for_each():
    clock = ManualClock()
    with FakeLLM("x", clock=clock, sleep=clock.sleep, seconds_per_token=0.01) as llm:
        llm.enqueue(" ".join("abcdefghij"))
        outputs = []
        while llm.has_unfinished_requests:
            llm._driver._step(most_tokens=4)
            outputs += llm._stepping._collector.take()
        events = outputs[-1].timeline.events
    chunks = [event for event in events if event.kind == "prefill"]
    assert [event.num_tokens for event in chunks] == [4, 4, 2]
    assert [round(event.ts, 6) for event in chunks] == [0, 0.01, 0.02]
    assert all(event.seconds == pytest.approx(0.01) for event in chunks)


def test_a_prompt_that_was_seen_before_tells_its_prefix_hit(llm):
    prompt = " ".join(f"w{number}" for number in range(40))
    llm.generate(prompt, use_tqdm=False)
    [output] = llm.generate(prompt, use_tqdm=False)
    [admitted] = [event for event in output.timeline if event.kind == "admitted"]
    assert admitted.num_tokens == output.num_cached_tokens >= 32


def test_embeddings_have_a_timeline_too(llm):
    [output] = llm.embed(["hello there"], use_tqdm=False)
    assert [event.kind for event in output.timeline] == [
        *("queued", "admitted", "prefill", "finished")
    ]
    pooled = PoolingRequestOutput("p", PoolingOutput(None), [1, 2], metrics=output.metrics)
    classified = ClassificationOutput("c", [1, 2], [1.0], ["yes"], metrics=output.metrics)
    assert pooled.timeline == classified.timeline == output.timeline


def test_long_timelines_keep_their_beginning_and_their_end():
    events = ()
    for number in range(1000):
        events = with_event(events, RequestEvent(float(number), "prefill", num_tokens=1))
    assert len(events) == MAX_EVENTS
    begin, end = events[: MAX_EVENTS // 2], events[MAX_EVENTS // 2 + 1 :]
    assert [event.ts for event in begin] == list(range(64))
    assert [event.ts for event in end] == list(range(1000 - 63, 1000))
    omitted = events[MAX_EVENTS // 2]
    assert (omitted.kind, omitted.ts, omitted.num_events) == ("omitted", 64.0, 1000 - 127)
    timeline = Timeline(0.0, events)
    assert "omitted      873 events" in str(timeline)


def test_what_happens_at_the_same_time_is_told_in_its_order():
    metrics = RequestMetrics(
        arrival_time=1.0,
        queued_ts=1.0,
        first_token_ts=1.0,
        finished_ts=1.0,
        events=(
            RequestEvent(1.0, "admitted"),
            RequestEvent(1.0, "swapped_in", num_pages=1, kv_bits=8),
            RequestEvent(1.0, "prefill", num_tokens=3),
            RequestEvent(1.0, "recoded", num_pages=2, kv_bits=4),
        ),
        num_draft_tokens=9,
        num_accepted_tokens=4,
        mask_seconds=0.0015,
    )
    lines = str(Timeline.of(metrics, 3, ["length"])).split("\n")
    assert [line[15:].strip() for line in lines] == [
        "queued       a prompt of 3 tokens",
        "admitted     0 tokens from the cache",
        "swapped in   1 page of 8 bits",
        "prefill      3 tokens in 0.0 ms",
        "first token",
        "recoded      2 pages to 4 bits",
        "finished     length: 0 tokens; 4 of 9 drafts accepted; 1.5 ms waiting for masks",
    ]


def test_an_output_without_metrics_has_no_timeline(llm):
    [output] = llm.generate("x", use_tqdm=False)
    assert output._replace(metrics=None).timeline is None
