"""What a replica reports of its scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.cluster.replicas import report as report_module
from sdk.cluster.replicas.report import ReplicaReport, Reporter
from sdk.cluster.simulation.costs import StepCosts
from sdk.cluster.simulation.executor import END, CostExecutor
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.testing import ManualClock

COSTS = StepCosts(
    decode=((1, 0.01), (32, 0.041)),
    prompt_step=0.01,
    per_token=1e-3,
    per_pair=0.0,
    per_key=0.0,
    page_size=16,
    num_pages=101,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=1024,
)


class Replica:
    """A scheduler with scripted answers, and its reporter."""

    def __init__(self, **values: Any) -> None:
        self.clock = ManualClock()
        config = SchedulerConfig(
            num_pages=COSTS.num_pages,
            max_model_len=COSTS.max_model_len,
            max_num_seqs=COSTS.max_num_seqs,
            max_num_batched_tokens=COSTS.max_num_batched_tokens,
            eos_token_ids=frozenset({END}),
        )
        self.scheduler = Scheduler(dataclasses.replace(config, **values), self.clock)
        self.executor = CostExecutor(COSTS, self.clock.sleep)
        self.reporter = Reporter(self.scheduler)

    def add(self, name: str, prompt: list[int], answer: int = 40, **values: Any) -> None:
        final = RequestOutputKind.FINAL_ONLY
        params = SamplingParams(max_tokens=500, output_kind=final, **values)
        self.executor.answers[name] = [*[7] * (answer - 1), END]
        self.scheduler.queues.add(Request(Job(SequenceSpec(name, params), tuple(prompt))))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.scheduler.plan()
            assert plan is not None
            self.executor.launch(plan)
            self.scheduler.commit(self.executor.result())

    def run(self) -> None:
        while self.scheduler.queues.unfinished:
            self.step()

    def report(self, received: int | None = None) -> ReplicaReport:
        report = self.reporter.report(received)
        assert report is not None
        return report


def known(reports: Iterator[ReplicaReport] | list[ReplicaReport]) -> set[bytes]:
    """The digests that a router knows after these reports."""
    found: set[bytes] = set()
    for one in reports:
        found = (set() if one.full else found) | set(one.published)
        found -= set(one.evicted)
    return found


def test_a_report_counts_the_prompt_tokens_that_are_left() -> None:
    replica = Replica()
    replica.add("a", list(range(100)))
    replica.add("b", list(range(1000, 1030)))
    report = replica.report()
    assert (report.num_waiting, report.num_running, report.prompt_tokens) == (2, 0, 130)
    replica.step()
    report = replica.report()
    assert (report.num_waiting, report.num_running, report.prompt_tokens) == (1, 1, 66)
    replica.step()
    replica.step()
    report = replica.report()
    assert (report.num_running, report.num_decoding, report.prompt_tokens) == (2, 2, 0)
    assert report.step == 3
    assert report.free_pages == 100 - (7 + 2)


def test_cached_tokens_of_waiting_requests_are_not_left() -> None:
    replica = Replica()
    replica.add("a", list(range(100)), answer=1)
    replica.run()
    replica.add("b", [*range(100), *range(500, 520)])
    assert replica.report().prompt_tokens == 120 - 96


def test_a_look_changes_no_request_because_another_thread_may_run_it() -> None:
    replica = Replica()
    replica.add("a", list(range(100)), answer=1)
    replica.run()
    replica.add("b", [*range(100), *range(500, 520)])
    look = replica.reporter.look()
    assert look is not None
    assert look.prompt_tokens == 120 - 96
    assert replica.scheduler.queues.unfinished["b"].keys == []


def test_a_report_has_the_step_times_that_were_measured() -> None:
    replica = Replica()
    assert replica.report().seconds_per_token == 0.0
    replica.add("a", list(range(300)), answer=100)
    for number in range(2):
        replica.run()
        replica.add(f"b{number}", list(range(number * 1000, number * 1000 + 300)), answer=100)
    replica.run()
    report = replica.report()
    assert report.seconds_per_token == pytest.approx(1e-3, rel=0.1)
    assert report.decode_seconds == pytest.approx(0.01, rel=0.1)


def test_the_pages_of_all_reports_are_those_that_the_pool_knows() -> None:
    replica = Replica()
    reports = [replica.report()]
    assert reports[0].full
    for number in range(30):  # more than 100 pages in all, so some are evicted
        replica.add(f"r{number}", list(range(number * 999, number * 999 + 120)), answer=20)
        while replica.scheduler.queues.unfinished:
            replica.step()
            if (one := replica.reporter.report()) is not None:
                reports.append(one)
    assert any(one.evicted for one in reports)
    assert not any(set(one.evicted) & set(one.published) for one in reports)
    assert not any(one.full for one in reports[1:])
    pool = replica.scheduler.pool
    full = {key.digest for page in range(101) if (key := pool.key(page)) and len(key[2]) == 16}
    assert known(reports) == full


def test_a_reporter_that_comes_later_lists_what_is_there() -> None:
    replica = Replica()
    replica.add("a", list(range(100)), answer=1)
    replica.run()
    report = Reporter(replica.scheduler).report()
    assert report is not None
    assert report.full
    assert len(known([report])) == 6  # without the tail


def test_a_cache_that_was_reset_makes_earlier_reports_void() -> None:
    replica = Replica()
    replica.add("a", list(range(100)), answer=1)
    replica.run()
    first = replica.report()
    replica.scheduler.reset_prefix_cache()
    assert known([first, replica.report()]) == set()


def test_keys_come_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "_MOST_KEYS", 2)
    replica = Replica()
    replica.report()
    replica.add("a", list(range(160)), answer=1)
    replica.run()
    reports = [replica.report()]
    while (one := replica.reporter.report()) is not None:
        reports.append(one)
    assert [len(one.published) for one in reports] == [2, 2, 2, 2, 2]


def test_keys_that_nobody_asks_for_do_not_pile_up() -> None:
    replica = Replica()
    reporter = replica.reporter
    for number in range(3 * (2 * 101 + report_module._MOST_KEYS)):
        key = report_module.PageKey(number.to_bytes(32), b"", (0,) * 16)
        reporter._on_known(key, True)
    assert len(reporter._keys[1]) <= 2 * 101 + report_module._MOST_KEYS
    assert replica.report().full


def test_nothing_is_reported_while_the_same_requests_decode() -> None:
    replica = Replica()
    replica.add("a", list(range(20)), answer=200)
    replica.step(2)
    replica.report()
    reports = []
    for _ in range(130):
        replica.step()
        reports.append(replica.reporter.report())
    assert 1 <= sum(one is not None for one in reports) <= 4


def test_a_report_says_how_many_requests_have_come() -> None:
    replica = Replica()
    replica.add("a", [1, 2])
    assert replica.report().received == 1
    assert replica.report(received=5).received == 5


def test_what_is_left_of_answers_is_expected_to_be_as_long_as_the_last_ones() -> None:
    replica = Replica()
    replica.add("a", [1, 2], answer=40)
    replica.run()
    replica.add("b", [3, 4])
    report = replica.report()
    assert report.answer_tokens == 40
    assert report.output_tokens == 40
    replica.step(11)
    assert replica.report(received=9).output_tokens == 29


def test_tenants_are_reported_if_the_policy_is_fair() -> None:
    replica = Replica(policy="fair", tenant_weights={"b": 2.0})
    replica.add("1", list(range(30)), tenant="a")
    replica.add("2", list(range(40, 60)), tenant="b")
    assert set(replica.report().tenants) == {("a", 30, 1.0), ("b", 20, 2.0)}


def test_priorities_are_reported_if_the_policy_looks_at_them() -> None:
    replica = Replica(policy="priority")
    replica.add("1", list(range(30)), priority=2)
    replica.add("2", list(range(40, 60)), priority=-1)
    assert replica.report().priorities == ((-1, 20), (2, 30))
    assert Replica().report().priorities == ()


def test_what_was_looked_at_and_not_taken_is_in_the_next_report() -> None:
    replica = Replica()
    replica.report()
    replica.add("a", list(range(100)), answer=1)
    replica.run()
    first = replica.reporter.look()
    assert first is not None
    assert len(first.published) == 6
    assert replica.reporter.look() == first
    replica.reporter.taken(first)
    assert replica.reporter.look() is None


def test_what_changes_after_a_look_is_in_the_next_report() -> None:
    replica = Replica()
    replica.report()
    replica.add("a", list(range(100)), answer=1)
    replica.run()
    first = replica.reporter.look()
    assert first is not None
    pool = replica.scheduler.pool
    gone = next(
        page for page in range(101) if pool.key(page) and pool.key(page)[0] in known([first])
    )
    digest = pool.key(gone)[0]
    pool.forget([gone])
    replica.reporter.taken(first)
    second = replica.report(received=7)
    assert (second.published, second.evicted) == ((), (digest,))


def test_a_cache_that_is_reset_after_a_look_makes_that_report_void() -> None:
    replica = Replica()
    replica.add("a", list(range(100)), answer=1)
    replica.run()
    first = replica.reporter.look()
    assert first is not None
    replica.scheduler.reset_prefix_cache()
    replica.reporter.taken(first)
    assert replica.report().full
