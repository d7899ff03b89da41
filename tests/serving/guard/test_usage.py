"""Limits of callers: exact under concurrency, with headers that tell the truth."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sdk.api.errors import RequestError
from sdk.serving.access import Refused
from sdk.serving.guard.limits import Limits, format_duration
from sdk.serving.guard.usage import Meter, Reservation
from tests.serving.guard.clock import Clock

DAY = 86_400


def make(journal: Any = None) -> tuple[Meter, Clock, Clock]:
    clock, wall = Clock(), Clock(20_000 * DAY + 12 * 3600)
    return Meter(journal, clock=clock, wall=wall), clock, wall


def refused(meter: Meter, limits: Limits, tokens: int, name: str = "a") -> Refused:
    with pytest.raises(Refused) as caught:
        meter.reserve(name, limits, tokens)
    assert caught.value.status == 429
    return caught.value


def test_a_reservation_is_replaced_by_what_was_used() -> None:
    meter, _, _ = make()
    limits = Limits(tokens_per_minute=100)
    first = meter.reserve("a", limits, 80)
    refused(meter, limits, 30)
    first.settle(50)
    meter.reserve("a", limits, 50)
    refused(meter, limits, 1)


def test_only_the_first_settlement_counts() -> None:
    meter, _, _ = make()
    limits = Limits(tokens_per_minute=100, concurrent=2)
    first = meter.reserve("a", limits, 80)
    for tokens in (60, 0, 0):
        first.settle(tokens)
    assert meter.headers("a", limits)["x-ratelimit-remaining-tokens"] == "40"
    meter.reserve("a", limits, 1)
    meter.reserve("a", limits, 1)
    refused(meter, limits, 1)  # the second settlement did not free a second place


def test_callers_do_not_share_limits() -> None:
    meter, _, _ = make()
    limits = Limits(requests_per_minute=1)
    meter.reserve("a", limits, 1)
    meter.reserve("b", limits, 1)
    refused(meter, limits, 1, "a")


def test_the_refusal_says_which_limit_and_when_to_come_back() -> None:
    meter, clock, _ = make()
    limits = Limits(requests_per_minute=2, tokens_per_minute=1000)
    meter.reserve("a", limits, 10)
    clock.now = 12.5
    meter.reserve("a", limits, 10)
    error = refused(meter, limits, 10)
    assert error.code == "rate_limit_exceeded"
    assert "requests per minute" in error.message and "2" in error.message
    assert error.headers == {
        "retry-after": "48",
        "retry-after-ms": "47500",
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "980",
        "x-ratelimit-reset-tokens": "1m0s",
    }
    clock.now = 59.99
    refused(meter, limits, 10)
    clock.now = 60.0
    meter.reserve("a", limits, 10)


def test_the_longest_wait_is_reported() -> None:
    meter, clock, _ = make()
    limits = Limits(requests_per_minute=2, tokens_per_minute=100)
    meter.reserve("a", limits, 1)
    clock.now = 30.0
    meter.reserve("a", limits, 99)
    assert refused(meter, limits, 50).headers["retry-after"] == "60"


def test_a_request_that_can_never_fit_is_told_so() -> None:
    meter, _, _ = make()
    for limits in (Limits(tokens_per_minute=100), Limits(tokens_per_day=100)):
        error = refused(meter, limits, 101)
        assert "too large" in error.message and "max_tokens" in error.message
        assert error.headers["x-should-retry"] == "false"
        assert "retry-after" not in error.headers
        meter.reserve("never", limits, 100)
        meter = make()[0]


def test_concurrent_requests() -> None:
    meter, _, _ = make()
    limits = Limits(concurrent=2)
    first, _second = meter.reserve("a", limits, 1), meter.reserve("a", limits, 1)
    error = refused(meter, limits, 1)
    assert error.headers["retry-after"] == "1" and "at one time" in error.message
    first.settle(1)
    meter.reserve("a", limits, 1)


def test_a_refused_request_is_not_counted() -> None:
    meter, clock, _ = make()
    limits = Limits(requests_per_minute=1)
    meter.reserve("a", limits, 1)
    for _ in range(10):
        refused(meter, limits, 1)
    clock.now = 60.0
    meter.reserve("a", limits, 1)


def test_the_day_ends_at_midnight_utc() -> None:
    meter, clock, wall = make()
    limits = Limits(tokens_per_day=100)
    meter.reserve("a", limits, 100).settle(90)
    error = refused(meter, limits, 20)
    assert error.code == "insufficient_quota"
    assert error.headers["retry-after"] == str(12 * 3600) and "12h0m0s" in error.message
    clock.now += 12 * 3600
    wall.now += 12 * 3600
    meter.reserve("a", limits, 100)


def test_a_request_that_ends_the_next_day_gives_nothing_back_to_that_day() -> None:
    meter, _, wall = make()
    limits = Limits(tokens_per_day=100)
    late = meter.reserve("a", limits, 100)
    wall.now += DAY
    meter.reserve("a", limits, 100)
    late.settle(0)
    refused(meter, limits, 1)


def test_a_calendar_set_back_does_not_bring_a_day_back() -> None:
    meter, _, wall = make()
    limits = Limits(tokens_per_day=100)
    meter.reserve("a", limits, 100)
    wall.now -= 3 * DAY
    refused(meter, limits, 1)


def test_idle_callers_are_forgotten_and_busy_ones_kept() -> None:
    meter, clock, _ = make()
    limits = Limits(concurrent=1)
    busy = meter.reserve("busy", limits, 1)
    for index in range(5000):
        clock.now += 1
        meter.reserve(f"n{index}", limits, 1).settle(1)
    assert len(meter._callers) <= 2 * 1024
    refused(meter, limits, 1, "busy")
    busy.settle(1)
    meter.reserve("busy", limits, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0174, "17ms"),
        (1, "1s"),
        (59.6, "1m0s"),
        (361, "6m1s"),
        (7322, "2h2m2s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "5", 2**53])
def test_a_limit_must_be_a_whole_number(value: Any) -> None:
    with pytest.raises(RequestError, match="tokens_per_day: expected a whole number of at least 1"):
        Limits(tokens_per_day=value)


def test_an_unknown_limit_is_named() -> None:
    with pytest.raises(RequestError, match=r"'rpm' is unknown; known are concurrent"):
        Limits.from_mapping({"rpm": 5})


def test_own_limits_come_before_those_of_the_server() -> None:
    own, server = Limits(concurrent=2), Limits(concurrent=8, tokens_per_day=9)
    assert own.or_else(server) == Limits(concurrent=2, tokens_per_day=9)


class Requests(RuleBasedStateMachine):
    """Random requests against sums that are added up from scratch.

    Admitted if and only if every limit has room; what is admitted in any 60 seconds never uses
    more than the limit.
    """

    limits = Limits(requests_per_minute=6, tokens_per_minute=50, concurrent=3, tokens_per_day=120)

    def __init__(self) -> None:
        super().__init__()
        self.meter, self.clock, self.wall = make()
        self.log: list[list[float]] = []  # [time, day, tokens]
        self.running: list[tuple[Reservation, list[float]]] = []

    def sums(self) -> tuple[int, float, float]:
        recent = [e for e in self.log if e[0] > self.clock.now - 60]
        today = self.wall.now // DAY
        return len(recent), sum(e[2] for e in recent), sum(e[2] for e in self.log if e[1] == today)

    @rule(seconds=st.sampled_from([0.0, 0.5, 10.0, 59.5, 60.0, 20_000.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.wall.now += seconds

    @rule(tokens=st.integers(1, 60))
    def request(self, tokens: int) -> None:
        requests, minute, day = self.sums()
        fits = (
            requests + 1 <= 6
            and minute + tokens <= 50
            and len(self.running) < 3
            and day + tokens <= 120
        )
        try:
            reservation = self.meter.reserve("a", self.limits, tokens)
        except Refused as refused:
            assert not fits, refused.message
        else:
            assert fits
            entry = [self.clock.now, self.wall.now // DAY, float(tokens)]
            self.log.append(entry)
            self.running.append((reservation, entry))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 2), part=st.floats(0, 1))
    def end(self, which: int, part: float) -> None:
        reservation, entry = self.running.pop(which % len(self.running))
        used = int(reservation.tokens * part)
        reservation.settle(used)
        entry[2] = used

    @invariant()
    def headers_tell_the_sums(self) -> None:
        requests, minute, _ = self.sums()
        headers = self.meter.headers("a", self.limits)
        assert headers["x-ratelimit-remaining-requests"] == str(6 - requests)
        assert headers["x-ratelimit-remaining-tokens"] == str(int(50 - minute))


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("limits", "tokens", "admitted"),
    [
        (Limits(requests_per_minute=500), 1, 500),
        (Limits(tokens_per_minute=1000), 3, 333),
        (Limits(tokens_per_day=1000), 7, 142),
        (Limits(concurrent=250), 1, 250),
    ],
)
def test_threads_admit_exactly_the_limit(limits: Limits, tokens: int, admitted: int) -> None:
    meter, _, _ = make()
    counts, start = [], threading.Barrier(8)

    def ask() -> None:
        count = 0
        start.wait()
        for _ in range(200):
            try:
                meter.reserve("a", limits, tokens)
                count += 1
            except Refused:
                pass
        counts.append(count)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == admitted


def test_threads_that_settle_never_exceed_a_limit_and_leave_nothing_behind() -> None:
    meter, clock, _ = make()
    limits = Limits(concurrent=5, tokens_per_minute=10_000)
    inside, most, wrong, done = 0, 0, 0, []
    lock, start = threading.Lock(), threading.Barrier(8)

    def ask() -> None:
        nonlocal inside, most, wrong
        start.wait()
        for _ in range(300):
            try:
                reservation = meter.reserve("a", limits, 100)
            except Refused:
                continue
            with lock:
                inside += 1
                most = max(most, inside)
                wrong += inside > 5
            with lock:
                inside -= 1
            reservation.settle(1)
            done.append(1)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == 0 and 1 <= most <= 5
    used = 10_000 - len(done)
    assert meter.headers("a", limits)["x-ratelimit-remaining-tokens"] == str(used)
    clock.now += 60
    assert meter.headers("a", limits)["x-ratelimit-remaining-tokens"] == "10000"


def test_coroutines_admit_exactly_the_limit() -> None:
    meter, _, _ = make()
    limits = Limits(tokens_per_minute=1000, concurrent=50)

    async def ask() -> int:
        try:
            reservation = meter.reserve("a", limits, 10)
        except Refused:
            return 0
        await asyncio.sleep(0)
        reservation.settle(5)
        return 5

    async def all_of_them() -> int:
        total = 0
        for _ in range(10):  # waves: each settles before the next asks
            total += sum(await asyncio.gather(*(ask() for _ in range(100))))
        return total

    # 50 run at one time and each wave uses 250; when less than 10 would be left, none is admitted.
    assert asyncio.run(all_of_them()) == 1000 - 5
