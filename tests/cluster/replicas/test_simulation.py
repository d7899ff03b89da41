"""Simulations: the same times as a real engine, and what events do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.cluster.simulation.autoscaling import Autoscaling
from sdk.cluster.simulation.cluster import Failure, Scenario, Simulation, Straggler
from sdk.cluster.simulation.costs import StepCosts
from sdk.cluster.simulation.executor import CostExecutor
from sdk.cluster.simulation.replica import scheduler_config
from sdk.cluster.simulation.results import Results, deviation, percentile
from sdk.cluster.simulation.workload import SimulatedRequest, SyntheticWorkload, parse_mix
from sdk.engine.engine import Engine
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.metrics.slo import SLO
from sdk.requests.driving.driver import Driver
from sdk.testing import ManualClock

COSTS = StepCosts(
    decode=((1, 0.01), (8, 0.03), (32, 0.09)),
    prompt_step=0.01,
    per_token=6e-4,
    per_pair=3e-8,
    per_key=2e-7,
    page_size=16,
    num_pages=2049,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    max_model_len=8192,
)
MIX = {"chats": 0.8, "documents": 0.1, "completions": 0.1}


class Given:
    """These requests, and no others."""

    def __init__(self, requests: list[SimulatedRequest]) -> None:
        self._requests = requests

    def arrivals(self) -> Iterator[SimulatedRequest]:
        yield from self._requests

    def next_turn(self, request: SimulatedRequest, now: float) -> None:
        return None


def synthetic(count: int, rate: float, seed: int = 1) -> SyntheticWorkload:
    times = [(number + 1) / rate for number in range(count)]
    return SyntheticWorkload(MIX, times, count, seed)


def drawn(count: int, rate: float, seed: int = 1) -> list[SimulatedRequest]:
    return list(synthetic(count, rate, seed).arrivals())


def run(requests: list[SimulatedRequest], scenario: Scenario) -> tuple[Simulation, Results]:
    simulation = Simulation(scenario, Given(requests))
    return simulation, simulation.run()


def engine_times(
    requests: list[SimulatedRequest], costs: StepCosts
) -> dict[str, tuple[float, ...]]:
    """Arrival, first and last token of each request, run by an engine and its driver."""
    clock = ManualClock()
    executor = CostExecutor(costs, clock.sleep)
    engine = Engine(Scheduler(scheduler_config(costs), clock), executor)
    driver = Driver(engine)
    waiting, found = list(requests), {}
    try:
        while waiting or engine.has_unfinished:
            if not engine.has_unfinished and waiting[0].arrival > clock():
                clock.sleep(waiting[0].arrival - clock())
            while waiting and waiting[0].arrival <= clock():
                one = waiting.pop(0)
                executor.answers[str(one.number)] = one.answer
                params = SamplingParams(max_tokens=one.max_tokens, detokenize=False)
                spec = SequenceSpec(str(one.number), params)
                engine.add(Job(spec, tuple(one.prompt), arrival_time=one.arrival))
            for output in driver.step():
                if output.finished:
                    metrics = output.metrics
                    times = metrics.arrival_time, metrics.first_token_ts, metrics.last_token_ts
                    found[output.request_id] = times
    finally:
        driver.close()
    return found


@pytest.mark.parametrize("pages", [2049, 400])
def test_a_replica_has_the_times_of_an_engine_with_its_driver(pages: int) -> None:
    # with 400 pages requests wait for pages and are preempted
    costs = replace(COSTS, num_pages=pages)
    requests = drawn(60, rate=4.0)
    real = engine_times(requests, costs)
    _, results = run(requests, Scenario(1, costs))
    everything = results.all
    assert len(real) == len(everything.ttft) == 60
    expected = sorted(first - arrival for arrival, first, _ in real.values())
    assert sorted(everything.ttft) == pytest.approx(expected, abs=1e-9)
    expected = sorted(last - arrival for arrival, _, last in real.values())
    assert sorted(everything.e2e) == pytest.approx(expected, abs=1e-9)
    assert max(everything.ttft) > 1.0  # some waited
    assert (results.num_preemptions > 0) == (pages == 400)


@pytest.mark.parametrize("policy", ["state", "requests", "round_robin"])
def test_a_simulation_gives_the_same_results_each_time(policy: str) -> None:
    def once() -> tuple[list[float], int, float]:
        scenario = Scenario(3, COSTS, policy)  # type: ignore[arg-type]
        results = Simulation(scenario, synthetic(120, 2.0)).run()
        return results.all.ttft, results.num_moved_turns, results.seconds

    assert once() == once()


def test_conversations_grow_and_find_their_prefix() -> None:
    results = Simulation(Scenario(2, COSTS), synthetic(200, 1.0)).run()
    chats = results.classes["chats"]
    assert chats.cached_tokens > 0.8 * chats.prompt_tokens
    assert len(results.all.ttft) == 200
    assert 0 < results.utilization < 1


@pytest.mark.slow
def test_chats_get_their_first_tokens_sooner_with_the_state_policy() -> None:
    found = {}
    for policy in ("state", "requests"):
        scenario = Scenario(4, COSTS, policy)  # type: ignore[arg-type]
        results = Simulation(scenario, synthetic(600, 3.0)).run()
        found[policy] = percentile(results.classes["chats"].ttft, 99)
    assert found["state"] <= 0.7 * found["requests"]


def test_the_requests_of_a_failed_replica_are_run_by_another() -> None:
    requests = drawn(40, rate=8.0)
    scenario = Scenario(2, COSTS, failures=(Failure(0, 2.0, math.inf),))
    simulation, results = run(requests, scenario)
    assert simulation.num_ended == 40
    assert results.num_rerouted > 0
    assert results.all.output_tokens == sum(len(one.answer) for one in requests)
    _, undisturbed = run(requests, Scenario(2, COSTS))
    assert results.seconds > undisturbed.seconds
    assert results.replicas == [(0.0, 2), (2.0, 1)]


def test_requests_wait_while_no_replica_is_alive() -> None:
    requests = drawn(10, rate=10.0)
    scenario = Scenario(1, COSTS, failures=(Failure(0, 0.5, 20.0),))
    simulation, results = run(requests, scenario)
    assert simulation.num_ended == 10
    assert max(results.all.ttft) > 19.0


def test_requests_that_no_replica_will_run_are_an_error() -> None:
    scenario = Scenario(1, COSTS, failures=(Failure(0, 0.5, math.inf),))
    with pytest.raises(RequestError, match="requests are left and no replica is alive"):
        run(drawn(10, rate=10.0), scenario)


def test_a_straggler_gets_fewer_requests_from_the_state_policy() -> None:
    def longest(policy: str) -> float:
        scenario = Scenario(3, COSTS, policy, stragglers=(Straggler(1, 5.0),))  # type: ignore[arg-type]
        results = Simulation(scenario, synthetic(300, 1.0)).run()
        return percentile(results.classes["chats"].e2e, 95)

    assert longest("state") < 0.7 * longest("round_robin")


def test_autoscaling_adds_replicas_under_load_and_removes_them_again() -> None:
    policy = Autoscaling(least=1, most=4, by="queue", target=2.0, every=5.0)
    early = drawn(100, rate=5.0)
    late = [
        replace(one, number=100 + i, arrival=200.0 + 20 * i) for i, one in enumerate(early[:20])
    ]
    scenario = Scenario(1, COSTS, autoscaling=policy, startup=3.0)
    simulation, results = run([*early, *late], scenario)
    counts = [number for _, number in results.replicas]
    assert simulation.num_ended == 120
    assert max(counts) > 1
    assert counts[-1] == 1
    first_added = next(time for time, number in results.replicas if number == 2)
    assert first_added >= 5.0 + 3.0


def test_autoscaling_by_time_to_the_first_token_adds_replicas() -> None:
    policy = Autoscaling(least=1, most=3, by="ttft", target=0.5, every=5.0)
    _, results = run(drawn(100, rate=5.0), Scenario(1, COSTS, autoscaling=policy, startup=1.0))
    assert max(number for _, number in results.replicas) == 3


def test_good_requests_meet_the_objective() -> None:
    results = Results(SLO(ttft=1.0, tpot=0.1))
    results.ended("a", ttft=0.5, e2e=1.4, prompt=10, cached=0, answer=10)
    results.ended("a", ttft=0.5, e2e=1.6, prompt=10, cached=0, answer=10)
    results.ended("b", ttft=1.5, e2e=1.6, prompt=10, cached=5, answer=1)
    results.seconds = 2.0
    assert results.goodput == 0.5
    assert results.hit_rate == pytest.approx(5 / 30)


def test_deviation_compares_simulated_times_with_measured_ones() -> None:
    found = deviation([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])
    assert set(found) == {"mean", "p50", "p90", "p99"}
    assert all(value == pytest.approx(0.1) for value in found.values())


def test_deviation_needs_as_many_times_of_both() -> None:
    with pytest.raises(RequestError, match=r"deviation: expected as many .* found 1 and 2"):
        deviation([1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": 0}, "replicas: expected at least 1, found 0"),
        ({"startup": -1.0}, "startup: expected seconds"),
        ({"failures": (Failure(2, 1.0, 1.0),)}, "failure: expected a replica from 0 to 1, found 2"),
        ({"failures": (Failure(0, -1.0, 1.0),)}, "failure: expected seconds"),
        ({"stragglers": (Straggler(0, 0.0),)}, "straggler: expected a factor above 0"),
        ({"stragglers": (Straggler(-1, 2.0),)}, "straggler: expected a replica"),
    ],
)
def test_a_scenario_that_makes_no_sense_is_rejected(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        Scenario(**({"replicas": 2, "costs": COSTS} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["chats=x", "chats", "cats=1", "chats=1,chats=1", "chats=-1"])
def test_a_mix_that_cannot_be_read_is_rejected(text: str) -> None:
    with pytest.raises(RequestError, match="mix: expected shares of chats, documents"):
        parse_mix(text)


def test_a_mix_of_nothing_is_rejected() -> None:
    with pytest.raises(RequestError, match="mix: expected a share above 0"):
        parse_mix("chats=0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("least=1", "expected least and most"),
        ("least=1,most=x", "expected parts like least=2"),
        ("least=1,most=2,size=3", "expected parts like least=2"),
        ("least=3,most=2", "expected 1 <= least <= most replicas, found 3 and 2"),
        ("least=1,most=2,by=luck", "by: expected queue or ttft"),
        ("least=1,most=2,target=0", "target: expected a number above 0"),
    ],
)
def test_autoscaling_that_cannot_be_read_is_rejected(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"autoscale: {message}"):
        Autoscaling.parse(text)
