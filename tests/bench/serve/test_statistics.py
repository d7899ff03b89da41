"""Numbers of a load test, from records with known times."""

from __future__ import annotations

import argparse
import itertools
import math
import random
from array import array

import pytest

from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.lengths import parse_lengths
from sdk.bench.serve.percentiles import Distribution, percentile
from sdk.bench.serve.record import Record
from sdk.bench.serve.slo import Slo, parse_slo
from sdk.bench.serve.summary import summarize


def record(
    due: float, ttft: float, gaps: tuple[float, ...] = (), tokens: int = 0, **more: object
) -> Record:
    """A request that was sent 10 ms late."""
    made = Record(due, sent=due + 0.01, prompt_tokens=10, output_tokens=tokens or 1 + len(gaps))
    made.first, made.last = due + ttft, due + ttft + sum(gaps)
    made.gaps = array("d", gaps)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_percentiles_are_interpolated_between_the_nearest_values() -> None:
    assert percentile([7.0], 99) == 7.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([float(i) for i in range(101)], 95) == 95.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    found = Distribution.of([4.0, 1.0, 3.0, 2.0])
    assert found == Distribution(4, 2.5, 2.5, pytest.approx(3.85), pytest.approx(3.97), 4.0)
    assert Distribution.of([]) is None


def test_the_summary_of_a_small_run_is_exact() -> None:
    records = [
        record(100.0, 0.5, (0.1, 0.3), queue_s=0.2),
        record(101.0, 1.5, (0.2,), queue_s=0.4),
        record(102.0, 1.0, tokens=1),
        Record(103.0, sent=103.0, error="HTTP 500", last=110.0),
    ]
    found = summarize(records, Slo(ttft=1.0, itl=0.2))
    assert (found.requests, found.completed, found.errors) == (4, 3, {"HTTP 500": 1})
    assert found.duration_s == pytest.approx(3.0)  # 100.0 to 103.0: the failure has no text
    assert (found.prompt_tokens, found.output_tokens) == (30, 6)
    assert found.request_rate == pytest.approx(1.0)
    assert found.prompt_rate == pytest.approx(10.0)
    assert found.output_rate == pytest.approx(2.0)
    assert found.latencies["ttft"].mean == pytest.approx(1.0)
    assert found.latencies["itl"].count == 3
    assert found.latencies["itl"].p50 == pytest.approx(0.2)
    assert found.latencies["tpot"].mean == pytest.approx(0.2)  # 0.4 / 2 and 0.2 / 1
    assert found.latencies["e2e"].max == pytest.approx(1.7)
    assert found.latencies["queue"].mean == pytest.approx(0.3)
    assert found.latencies["late"].p99 == pytest.approx(0.01)
    # The first breaks itl (95 % of 0.1 and 0.3 is 0.29), the second ttft; the third keeps both.
    assert (found.good, found.broken) == (1, {"itl": 1, "ttft": 1, "error": 1})
    assert found.good_share == 0.25
    assert found.good_rate == pytest.approx(1 / 3)


def test_a_run_without_requests_or_with_failures_only_has_zero_rates() -> None:
    empty = summarize([], Slo(ttft=1.0))
    assert (empty.requests, empty.request_rate, empty.good_share) == (0, 0.0, 0.0)
    assert empty.latencies == {}
    failed = summarize([Record(5.0, error="timeout", last=8.0)])
    assert (failed.duration_s, failed.request_rate, failed.completed) == (3.0, 0.0, 0)
    assert failed.good is None and failed.good_share is None


def test_latencies_count_from_when_a_request_was_due_not_from_when_it_was_sent() -> None:
    late = Record(10.0, sent=14.0, output_tokens=1)
    late.add(15.0, "x")
    found = summarize([late])
    assert found.latencies["ttft"].p50 == 5.0
    assert found.latencies["late"].p50 == 4.0


def test_pieces_make_gaps_and_an_answer_without_text_has_its_time_at_the_end() -> None:
    made = Record(0.0)
    for now, text in ((1.0, "a"), (1.5, "b"), (1.75, "c")):
        made.add(now, text)
    made.end(9.0)
    assert (made.answer, list(made.gaps), made.ttft, made.e2e) == ("abc", [0.5, 0.25], 1.0, 1.75)
    silent = Record(0.0, output_tokens=2)
    silent.end(3.0)
    assert (silent.ttft, silent.e2e, silent.tpot) == (3.0, 3.0, 0.0)


def test_an_slo_names_what_a_request_broke() -> None:
    slo = parse_slo("ttft=500ms,itl=0.05,tpot=40ms,e2e=2")
    assert slo == Slo(0.5, 0.05, 0.04, 2.0)
    assert str(slo) == "ttft=0.5,itl=0.05,tpot=0.04,e2e=2"
    assert slo.broken_by(record(0.0, 0.5, (0.04, 0.04))) == []
    assert slo.broken_by(record(0.0, 0.6, (0.06, 0.06))) == ["ttft", "itl", "tpot"]
    assert slo.broken_by(record(0.0, 0.1, (0.01,) * 99 + (1.9,))) == ["e2e"]  # 1 of 100 is late
    assert slo.broken_by(record(0.0, 0.1, (0.01,) * 90 + (0.06,) * 10)) == ["itl"]


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "itl=", "ttft=-1", "ttft=0", "ttft=1,ttft=2", "tft=1", "ttft=1m", "e2e=x"],
)
def test_a_bad_slo_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"such as ttft=0.5,itl=50ms; found"):
        parse_slo(text)


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("100", 100, 0),
        ("50-150", 100, 29.2),
        ("normal:100:10", 100, 10),
        ("lognormal:100:0.5", 100 * math.exp(0.125), 60.4),
        ("exp:100", 100, 100),
    ],
)
def test_lengths_have_their_distribution(text: str, mean: float, deviation: float) -> None:
    lengths = parse_lengths(text)
    draw = random.Random(1)
    values = [lengths.draw(draw) for _ in range(20000)]
    found = sum(values) / len(values)
    assert found == pytest.approx(mean, rel=0.03)
    spread = math.sqrt(sum((value - found) ** 2 for value in values) / len(values))
    assert spread == pytest.approx(deviation, rel=0.05, abs=0.1)
    assert min(values) >= 1 and str(lengths) == text


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "9-3", "1.5", "exp:0", "normal:5", "lognormal:5:9", "2000000", "exp:x"]
)
def test_bad_lengths_are_refused_with_the_forms(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected N, LOW-HIGH"):
        parse_lengths(text)


def test_arrivals_keep_their_rate_and_their_burstiness() -> None:
    for shape, variation in ((1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)):
        times = Arrivals(10.0, shape).times(5000, seed=3)
        assert times == sorted(times) and times[-1] == pytest.approx(500.0)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
        assert spread / mean == pytest.approx(variation, rel=0.06, abs=1e-9)


def test_the_same_seed_has_the_same_pattern_at_every_rate() -> None:
    one, two = Arrivals(1.0).times(50, seed=7), Arrivals(2.0).times(50, seed=7)
    assert two == pytest.approx([time / 2 for time in one])
    assert Arrivals(1.0).times(50, seed=8) != one
    assert Arrivals(4.0, 0.5).at(9.0) == Arrivals(9.0, 0.5)


def test_on_off_arrivals_fall_into_their_periods_at_the_mean_rate() -> None:
    times = Arrivals(5.0, on_s=2.0, off_s=8.0).times(1000, seed=1)
    assert all(time % 10.0 <= 2.0 + 1e-6 for time in times)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(1000 / 5.0, abs=10.0)
