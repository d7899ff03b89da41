"""Traces: files that Perfetto loads. The rules are those of Chrome's trace event format."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise

import pytest

from sdk import RequestError, SamplingParams
from sdk.metrics import trace as traces
from sdk.testing import FakeLLM, ManualClock


@pytest.fixture
def clock():
    return ManualClock(7000.0)


@pytest.fixture
def llm(clock):
    times = {"seconds_per_token": 0.01, "seconds_to_first_token": 0.1}
    with FakeLLM("one two three", clock=clock, sleep=clock.sleep, **times) as made:
        yield made


def checked(path):
    """The events of a file, after everything that the format demands was checked."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events = content["traceEvents"]
    named, slices = set(), defaultdict(list)
    for event in events:
        assert event["ph"] in "MXCi"
        if event["ph"] == "M":
            named.add((event["pid"], event["tid"]))
            assert event["args"]["name"]
            continue
        assert event["ts"] >= 0 and event["pid"] in (1, 2) and event["name"]
        if event["ph"] == "C":
            assert event["args"] and all(value >= 0 for value in event["args"].values())
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append(event)
    for track, found in slices.items():
        assert track in named and (track[0], 0) in named
        open_ends = []
        for event in sorted(found, key=lambda one: (one["ts"], -one["dur"])):
            end = event["ts"] + event["dur"]
            while open_ends and open_ends[-1] <= event["ts"] + 1e-2:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-2, "slices overlap"
            open_ends.append(end)
    for name in ("requests", "KV pages"):
        times = [e["ts"] for e in events if e["ph"] == "C" and e["name"] == name]
        assert all(a <= b for a, b in pairwise(times))
    return events, content["otherData"]


def of_process(events, process, name=None):
    found = [e for e in events if e["ph"] == "X" and e["pid"] == process]
    return [e for e in found if name is None or e["name"] == name]


def test_steps_have_their_parts_and_counts(llm, tmp_path):
    with llm.trace(tmp_path / "trace.json"):
        llm.generate(["a b", "c"], SamplingParams(max_tokens=3), use_tqdm=False)
    events, facts = checked(tmp_path / "trace.json")
    steps = of_process(events, 1, "step")
    assert [step["args"] for step in steps] == [
        {"requests": 2, "tokens": 3},
        {"requests": 2, "tokens": 2},
        {"requests": 2, "tokens": 2},
    ]
    assert [(step["ts"], step["dur"]) for step in steps] == [
        (0.0, pytest.approx(110_000)),
        (pytest.approx(110_000), pytest.approx(10_000)),
        (pytest.approx(120_000), pytest.approx(10_000)),
    ]
    for part in ("plan", "execute", "commit", "output"):
        assert len(of_process(events, 1, part)) == 3
    assert of_process(events, 1, "execute")[0]["dur"] == pytest.approx(110_000)
    counters = [(e["name"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters == [
        ("requests", {"running": 2, "waiting": 0}),
        ("KV pages", {"used": 2}),
        ("requests", {"running": 0, "waiting": 0}),
        ("KV pages", {"used": 0}),
    ]
    assert facts == {"steps": 3, "steps_dropped": 0, "requests": 2, "requests_dropped": 0}


def test_requests_are_tracks_with_phases(llm, tmp_path):
    with llm.trace(tmp_path / "trace.json"):
        llm.enqueue("hello there", SamplingParams(max_tokens=3, tenant="acme"), request_id="r")
        llm.step()
        llm._driver.between_steps(llm._driver.engine.scheduler.queues.preempt_last)
        llm.wait_for_completion()
    events, _ = checked(tmp_path / "trace.json")
    whole, *phases = of_process(events, 2)
    assert whole["name"] == "r" and whole["dur"] == pytest.approx(230_000)
    assert whole["args"]["tenant"] == ["acme"] and len(whole["args"]["timeline"]) == 8
    assert [(e["name"], round(e["ts"]), round(e["dur"])) for e in phases if e["dur"]] == [
        ("prefill 2", 0, 110_000),
        ("prefill 3", 110_000, 110_000),
        ("decode", 220_000, 10_000),
    ]


def test_a_request_takes_the_track_of_one_that_has_ended(llm, clock, tmp_path):
    with llm.trace(tmp_path / "trace.json"):
        for _ in range(3):
            llm.generate(["a", "b"], use_tqdm=False)
            clock.sleep(1.0)
    events, _ = checked(tmp_path / "trace.json")
    assert {event["tid"] for event in of_process(events, 2)} == {1, 2}


def test_requests_before_and_after_the_trace_are_cut_off(llm, clock, tmp_path):
    llm.enqueue("early", SamplingParams(max_tokens=4), request_id="early")
    llm.step()
    clock.sleep(5.0)
    trace = llm.trace(tmp_path / "trace.json")
    llm.enqueue("late", SamplingParams(max_tokens=4), request_id="late")
    llm.step()
    assert trace.stop() == tmp_path / "trace.json"
    events, facts = checked(tmp_path / "trace.json")
    names = {e["name"]: e for e in of_process(events, 2) if "args" in e}
    assert names.keys() == {"early", "late"} and facts["requests"] == 2
    assert names["early"]["ts"] == names["late"]["ts"] == 0
    assert names["early"]["dur"] == pytest.approx(110_000)
    assert len(llm.wait_for_completion()) == 2


def test_nothing_is_recorded_after_the_end_and_stop_may_be_called_again(llm, tmp_path):
    with llm.trace(tmp_path / "trace.json") as trace:
        llm.generate("a", use_tqdm=False)
    size = (tmp_path / "trace.json").stat().st_size
    llm.generate("b", use_tqdm=False)
    trace.stop()
    assert (tmp_path / "trace.json").stat().st_size == size
    assert llm._driver.engine.trace is None


def test_only_the_last_steps_are_kept(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_STEPS", 4)
    monkeypatch.setattr(traces, "MAX_REQUESTS", 2)
    with llm.trace(tmp_path / "trace.json"):
        for _ in range(3):
            llm.generate("a", use_tqdm=False)
    events, facts = checked(tmp_path / "trace.json")
    assert len(of_process(events, 1, "step")) == 4
    assert facts == {"steps": 12, "steps_dropped": 8, "requests": 3, "requests_dropped": 1}


def test_a_compressed_file(llm, tmp_path):
    with llm.trace(str(tmp_path / "trace.json.gz")):
        llm.generate("a", use_tqdm=False)
    assert len(of_process(checked(tmp_path / "trace.json.gz")[0], 1, "step")) == 4


def test_an_empty_trace_is_a_file_too(llm, tmp_path):
    llm.trace(tmp_path / "trace.json").stop()
    assert checked(tmp_path / "trace.json")[1]["steps"] == 0


def test_a_second_trace_and_a_bad_path_are_refused_by_name(llm, tmp_path):
    with pytest.raises(RequestError, match=r"trace: .*nowhere.* cannot be written"):
        llm.trace(tmp_path / "nowhere" / "trace.json")
    with llm.trace(tmp_path / "a.json"):
        with pytest.raises(RequestError, match=r"already records one, to .*a\.json"):
            llm.trace(tmp_path / "b.json")
        assert not (tmp_path / "b.json").exists()
    llm.trace(tmp_path / "b.json").stop()


def test_close_ends_a_trace_with_the_requests_it_aborts(tmp_path):
    llm = FakeLLM("one two three")
    llm.trace(tmp_path / "trace.json")
    llm.enqueue("a", request_id="a")
    llm.step()
    llm.close()
    events, facts = checked(tmp_path / "trace.json")
    assert facts["requests"] == 1
    assert "abort" in of_process(events, 2, "a")[0]["args"]["timeline"][-1]
