"""The router: what it knows about replicas, and which one it chooses."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from sdk.api.errors import EngineDeadError, RequestError
from sdk.cluster.replicas.report import ReplicaReport, TenantWork
from sdk.cluster.replicas.routing import ROUTING_POLICIES, Routed, Router
from sdk.engine.pages.page_pool import PageKey, page_key, root_digest
from sdk.testing import ManualClock

#: An idle replica: a token of a prompt takes 1 ms, a step that decodes 10 ms and 1 ms per request.
IDLE = ReplicaReport(
    step=0,
    received=0,
    num_waiting=0,
    num_running=0,
    num_decoding=0,
    prompt_tokens=0,
    prompt_pairs=0.0,
    output_tokens=0.0,
    answer_tokens=100.0,
    free_pages=1000,
    total_pages=1000,
    page_size=16,
    kv_type="auto",
    max_num_seqs=16,
    step_tokens=512,
    seconds_per_token=1e-3,
    seconds_per_pair=0.0,
    decode_seconds=1e-2,
    decode_row_seconds=1e-3,
    tenants=(),
    priorities=(),
    adapters=(),
    published=(),
    evicted=(),
    full=False,
)


def keys_of(tokens: list[int], salt: str | None = None, adapter: str | None = None) -> list[bytes]:
    parent, keys = root_digest(adapter, "auto", salt), list[PageKey]()
    for begin in range(0, len(tokens) // 16 * 16, 16):
        keys.append(page_key(parent, tokens[begin : begin + 16]))
        parent = keys[-1].digest
    return [key.digest for key in keys]


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first * 100_000, first * 100_000 + length))


class Replicas:
    """A router with idle replicas, and requests with numbers."""

    def __init__(self, count: int, policy: Any = "state") -> None:
        self.clock = ManualClock()
        self.router = Router(policy, self.clock)
        self._num = 0
        for replica in range(count):
            self.router.joined(replica)
            self.report(replica)

    def report(self, replica: int, **values: Any) -> None:
        self.router.report(replica, IDLE._replace(**values))

    def send(self, tokens: list[int], **values: Any) -> int:
        self._num += 1
        return self.router.choose(Routed(f"r{self._num}", tokens, **values))


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_a_burst_is_spread_over_all_replicas_before_any_of_them_reports(policy: str) -> None:
    replicas = Replicas(4, policy)
    chosen = [replicas.send(prompt(200, number)) for number in range(1, 101)]
    assert [chosen.count(replica) for replica in range(4)] == [25, 25, 25, 25]


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_the_same_requests_and_reports_get_the_same_replicas(policy: str) -> None:
    def run() -> list[int]:
        replicas = Replicas(5, policy)
        chosen = []
        for number in range(60):
            chosen.append(replicas.send(prompt(20 + number * 37 % 500, number % 7)))
            if number % 3 == 0:
                replicas.report(number % 5, prompt_tokens=number, received=number // 5)
        return chosen

    assert run() == run()


def test_a_request_does_not_wait_behind_a_long_prompt_while_another_replica_is_idle() -> None:
    replicas = Replicas(2)
    long = replicas.send(prompt(4000, 1))
    assert [replicas.send(prompt(50, number)) for number in range(2, 8)] == [1 - long] * 6


def test_the_fewest_requests_do_not_see_how_long_a_prompt_is() -> None:
    replicas = Replicas(2, "requests")
    long = replicas.send(prompt(4000, 1))
    assert replicas.send(prompt(50, 2)) == 1 - long
    assert replicas.send(prompt(50, 3)) == long


def test_round_robin_takes_each_replica_in_turn_and_leaves_out_those_that_are_gone() -> None:
    replicas = Replicas(3, "round_robin")
    assert len({replicas.send(prompt(9)) for _ in range(3)}) == 3
    replicas.router.lost(1)
    assert {replicas.send(prompt(9)) for _ in range(4)} == {0, 2}


def test_a_conversation_stays_where_its_prefix_is() -> None:
    replicas = Replicas(3)
    tokens = prompt(400)
    replicas.report(2, published=tuple(keys_of(tokens)), num_decoding=3, num_running=3)
    assert replicas.send([*tokens, *prompt(30, 5)]) == 2


def test_a_conversation_moves_when_waiting_costs_more_than_computing_it_again() -> None:
    replicas = Replicas(3)
    tokens = prompt(400)
    replicas.report(2, published=tuple(keys_of(tokens)), prompt_tokens=3000)
    assert replicas.send([*tokens, *prompt(30, 5)]) != 2


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"adapter": "a"}])
def test_a_prefix_counts_only_with_its_salt_and_its_adapter(other: dict[str, str]) -> None:
    replicas = Replicas(2)
    tokens = prompt(400)
    replicas.report(1, published=tuple(keys_of(tokens)), num_decoding=1, num_running=1)
    assert replicas.send([*tokens, 1]) == 1
    assert replicas.send([*tokens, 1], **other) == 0


def test_evicted_pages_do_not_count() -> None:
    replicas = Replicas(2)
    tokens = prompt(400)
    replicas.report(1, published=tuple(keys_of(tokens)), num_decoding=1, num_running=1)
    replicas.report(1, evicted=tuple(keys_of(tokens)), num_decoding=1, num_running=1)
    assert replicas.send([*tokens, 1]) == 0


def test_a_full_report_replaces_what_was_published_before() -> None:
    replicas = Replicas(2)
    tokens, busy = prompt(400), {"num_decoding": 1, "num_running": 1}
    replicas.report(1, published=tuple(keys_of(tokens)), **busy)
    replicas.report(1, published=tuple(keys_of(prompt(400, 7))), full=True, **busy)
    assert replicas.send([*tokens, 1]) == 0
    assert replicas.send([*prompt(400, 7), 1]) == 1


def test_requests_with_one_prefix_that_come_together_go_to_one_replica() -> None:
    replicas = Replicas(4)
    system = prompt(800)
    prompts = [[*system, *prompt(5, number)] for number in range(1, 6)]
    assert len({replicas.send(one, max_tokens=10) for one in prompts}) == 1


def test_a_promised_prefix_is_forgotten_when_its_request_ends_without_publishing_it() -> None:
    replicas = Replicas(2)
    first = replicas.send(prompt(800))
    replicas.router.ended("r1")
    replicas.report(first, received=1, num_running=1, num_decoding=1)
    assert replicas.send(prompt(800)) == 1 - first


def test_a_published_prefix_outlives_its_request() -> None:
    replicas = Replicas(2)
    tokens = prompt(800)
    first = replicas.send(tokens)
    published = tuple(keys_of(tokens))
    replicas.report(first, received=1, num_running=1, num_decoding=1, published=published)
    replicas.router.ended("r1")
    assert replicas.send(tokens) == first


def test_requests_that_a_report_contains_are_not_counted_twice() -> None:
    replicas = Replicas(2)
    first = replicas.send(prompt(1000, 1))
    replicas.report(first, received=1, prompt_tokens=0)  # it has run
    replicas.report(1 - first, prompt_tokens=300)
    assert replicas.send(prompt(50, 2)) == first


def choose_later(replicas: Replicas, name: str, tokens: list[int], **values: Any) -> int:
    return replicas.router.choose(Routed(name, tokens, **values), later=True)


def test_requests_that_are_sent_later_are_spread_before_any_of_them_is_sent() -> None:
    replicas = Replicas(4)
    chosen = [choose_later(replicas, str(index), prompt(200, index)) for index in range(1, 41)]
    assert sorted(map(chosen.count, range(4))) == [10] * 4
    assert len(replicas.router.unfinished(0)) == 10


def test_a_request_that_is_sent_later_is_not_in_a_report_before_it_is_sent() -> None:
    replicas = Replicas(2)
    assert choose_later(replicas, "a", prompt(4000, 1)) == 0
    assert choose_later(replicas, "b", prompt(4000, 2)) == 1
    replicas.router.closing(1)
    assert replicas.send(prompt(100, 3)) == 0
    replicas.report(0, received=1)  # the one that was sent, not "a"
    replicas.router.joined(2)
    replicas.report(2, prompt_tokens=2000)
    replicas.router.sent("a")
    replicas.router.sent("a")
    replicas.router.sent("nobody")
    assert replicas.send(prompt(50, 4), max_tokens=1) == 2
    replicas.report(0, received=2)
    assert replicas.send(prompt(50, 5), max_tokens=1) == 0


def test_a_prompt_counts_from_when_it_is_sent_and_then_only_what_was_not_handed_over() -> None:
    def second(how: dict[str, bool] | None) -> int:
        replicas = Replicas(2)
        replicas.report(1, prompt_tokens=500)
        assert choose_later(replicas, "a", prompt(1600, 1), max_tokens=1) == 0
        assert replicas.router.uncached("a") == 1600
        if how is not None:
            replicas.router.sent("a", **how)
            assert replicas.router.uncached("a") == (16 if how else 1600)
        return replicas.send(prompt(50, 2), max_tokens=1)

    assert second(None) == 0
    assert second({"handed_over": True}) == 0
    assert second({}) == 1


def test_what_was_handed_over_is_taken_off_again_with_a_report() -> None:
    replicas = Replicas(1)
    load = replicas.router._replicas[0]
    before = load.score(Routed("x", ()), 0, 0.0, 0.0)
    choose_later(replicas, "a", prompt(1605, 1))
    replicas.router.sent("a", handed_over=True)
    assert replicas.router.uncached("a") == 5
    replicas.report(0, received=1)
    assert load.score(Routed("x", ()), 0, 0.0, 0.0) == before
    assert (load._tokens, load._pairs, load._answers, load._pages) == (0, 0, 0, 0)


def test_a_request_that_ends_before_it_is_sent_leaves_nothing() -> None:
    replicas = Replicas(1)
    load = replicas.router._replicas[0]
    before = load.score(Routed("x", ()), 0, 0.0, 0.0)
    choose_later(replicas, "a", prompt(1600, 1))
    assert load.score(Routed("x", ()), 0, 0.0, 0.0) > before
    replicas.router.ended("a")
    assert load.score(Routed("x", ()), 0, 0.0, 0.0) == before
    assert choose_later(replicas, "a", prompt(1600, 1)) == 0
    assert replicas.router.lost(0) == ["a"]


@pytest.mark.parametrize(("slots", "chosen"), [(17, 0), (16, 1)])
def test_waiting_for_a_slot_counts(slots: int, chosen: int) -> None:
    replicas = Replicas(2)
    busy = {"num_running": 16, "num_decoding": 16, "output_tokens": 1600.0}
    replicas.report(0, **busy, max_num_seqs=slots)
    replicas.report(1, prompt_tokens=500)
    assert replicas.send(prompt(50), max_tokens=10) == chosen


@pytest.mark.parametrize(("pages", "chosen"), [(4, 0), (3, 1)])
def test_waiting_for_pages_counts(pages: int, chosen: int) -> None:
    replicas = Replicas(2)
    busy = {"num_running": 4, "num_decoding": 4, "output_tokens": 400.0}
    replicas.report(0, **busy, free_pages=pages)
    replicas.report(1, **busy, prompt_tokens=300)
    assert replicas.send(prompt(50)) == chosen


def test_a_slow_replica_gets_less() -> None:
    replicas = Replicas(2)
    slow = {"seconds_per_token": 4e-3, "decode_seconds": 4e-2, "decode_row_seconds": 4e-3}
    replicas.report(0, **slow)
    chosen = [replicas.send(prompt(200, number)) for number in range(1, 51)]
    assert 5 <= chosen.count(0) <= 15


def test_a_replica_that_only_computes_prompts_counts_as_fast_as_it_is() -> None:
    replicas = Replicas(2)
    never = {"decode_seconds": 0.0, "decode_row_seconds": 0.0}
    replicas.report(0, **never, seconds_per_token=4e-3)
    replicas.report(1, **never)
    chosen = [replicas.send(prompt(200, number), max_tokens=1) for number in range(1, 51)]
    assert 5 <= chosen.count(0) <= 15


def test_steps_that_decode_are_expected_as_measured_first_though_prompts_were_before() -> None:
    router = Router("state", ManualClock())
    router.joined(0)
    none = IDLE._replace(decode_seconds=0.0, decode_row_seconds=0.0)
    router.report(0, none._replace(seconds_per_token=0.5))
    router.report(0, IDLE._replace(seconds_per_token=0.5, decode_seconds=0.25))
    assert router._expected.seconds == (0.5, 0.0, 0.25, 1e-3)


def test_a_replica_that_has_measured_nothing_counts_as_fast_as_the_others() -> None:
    replicas = Replicas(2)
    replicas.report(0, seconds_per_token=0.0, decode_seconds=0.0, decode_row_seconds=0.0)
    chosen = [replicas.send(prompt(200, number)) for number in range(1, 21)]
    assert chosen.count(0) == 10


def test_a_replica_that_has_finished_nothing_is_as_good_as_one_with_short_answers() -> None:
    replicas = Replicas(20)  # more than are compared one by one
    unknown = {"answer_tokens": 0.0, "seconds_per_token": 0.0, "decode_seconds": 0.0}
    for replica in range(20):
        replicas.report(replica, **(unknown if replica < 10 else {"answer_tokens": 20.0}))
    chosen = [replicas.send(prompt(100, number)) for number in range(1, 21)]
    assert sorted(chosen) == list(range(20))


def test_a_replica_that_does_not_report_in_time_is_avoided() -> None:
    replicas = Replicas(2)
    replicas.report(0, prompt_tokens=100)  # 0.1 s
    replicas.clock.sleep(5.0)
    replicas.report(1, prompt_tokens=1000)
    assert replicas.send(prompt(50)) == 1


def test_a_report_counts_for_what_is_left_of_it_now() -> None:
    replicas = Replicas(2)
    replicas.report(0, prompt_tokens=1000)
    replicas.clock.sleep(0.9)
    replicas.report(1, prompt_tokens=500)
    assert replicas.send(prompt(50)) == 0


def test_an_adapter_that_is_loaded_or_about_to_be_counts() -> None:
    replicas = Replicas(2)
    replicas.report(1, adapters=("a",), num_decoding=1, num_running=1)
    assert replicas.send(prompt(20, 1), adapter="a", max_tokens=10) == 1
    assert replicas.send(prompt(20, 2), adapter="b", max_tokens=10) == 0
    replicas.report(1, adapters=("a",), received=1)
    assert replicas.send(prompt(20, 3), adapter="b", max_tokens=10) == 0


def test_a_tenant_does_not_wait_for_all_that_another_tenant_has_queued() -> None:
    replicas = Replicas(2)
    tenants = (TenantWork("heavy", 5000, 1.0),)
    replicas.report(0, prompt_tokens=5000, num_running=1, num_waiting=9, tenants=tenants)
    replicas.report(1, prompt_tokens=1000, num_running=1, num_waiting=1)
    assert replicas.send(prompt(100, 1), tenant="heavy") == 1
    assert replicas.send(prompt(100, 2), tenant="light") == 0


def test_an_urgent_request_does_not_wait_for_less_urgent_ones() -> None:
    replicas = Replicas(2)
    replicas.report(0, prompt_tokens=5000, num_running=1, num_waiting=9, priorities=((5, 5000),))
    replicas.report(1, prompt_tokens=1000, num_running=1, num_waiting=1, priorities=((0, 1000),))
    assert replicas.send(prompt(100, 1), priority=5) == 1
    assert replicas.send(prompt(100, 2), priority=0) == 0


def test_a_lost_replica_gives_back_its_requests_in_order_and_gets_no_more() -> None:
    replicas = Replicas(2)
    chosen = [replicas.send(prompt(100, number)) for number in range(6)]
    mine = [f"r{i + 1}" for i in range(6) if chosen[i] == 0]
    assert replicas.router.unfinished(0) == mine
    assert replicas.router.lost(0) == mine
    assert replicas.router.lost(0) == []
    assert replicas.router.replicas == [1]
    replicas.report(0)  # was on its way
    assert {replicas.router.choose(Routed(one, [1, 2])) for one in mine} == {1}


def test_what_a_lost_replica_held_is_forgotten_when_it_joins_again() -> None:
    replicas = Replicas(2)
    tokens = prompt(400)
    replicas.report(0, published=tuple(keys_of(tokens)))
    replicas.router.lost(0)
    replicas.router.joined(0)
    replicas.report(0, num_decoding=1, num_running=1)
    assert replicas.send([*tokens, 1]) == 1


def test_a_closing_replica_keeps_its_requests_and_gets_no_more() -> None:
    replicas = Replicas(2)
    chosen = [replicas.send(prompt(100, number)) for number in range(4)]
    replicas.router.closing(0)
    assert len(replicas.router.unfinished(0)) == chosen.count(0) == 2
    assert {replicas.send(prompt(100, number)) for number in range(5, 9)} == {1}
    replicas.router.ended("r1")
    replicas.report(0, received=2)
    assert replicas.router.replicas == [1]


def test_a_request_that_has_ended_counts_no_more() -> None:
    replicas = Replicas(2, "requests")
    first = replicas.send(prompt(10))
    replicas.router.ended("r1")
    replicas.router.ended("r1")
    assert replicas.router.unfinished(first) == []
    assert replicas.send(prompt(10)) == 1 - first  # it was sent less


def test_without_a_replica_the_error_says_so() -> None:
    router = Router()
    with pytest.raises(EngineDeadError, match="no replica is alive"):
        router.choose(Routed("r", [1]))


def test_an_unknown_policy_is_rejected_with_those_that_exist() -> None:
    with pytest.raises(RequestError, match="state, requests, round_robin, found 'best'"):
        Router("best")  # type: ignore[arg-type]


def test_a_replica_cannot_join_twice_and_an_id_cannot_be_used_twice() -> None:
    replicas = Replicas(1)
    with pytest.raises(RequestError, match="replica 0 has joined already"):
        replicas.router.joined(0)
    replicas.send([1, 2])
    with pytest.raises(RequestError, match="'r1' is already in use"):
        replicas.router.choose(Routed("r1", [1, 2]))


@pytest.mark.parametrize("wrong", [2**70, "a"])
def test_a_token_id_that_is_none_is_rejected(wrong: Any) -> None:
    replicas = Replicas(1)
    with pytest.raises(RequestError, match="token ids: expected integers of 64 bits"):
        replicas.send([*prompt(40), wrong])


def test_a_replica_with_other_pages_is_rejected() -> None:
    replicas = Replicas(2)
    with pytest.raises(RequestError, match="replica 1: expected pages of 16 tokens"):
        replicas.report(1, page_size=32)


def test_requests_are_routed_before_any_replica_has_reported() -> None:
    router = Router()
    router.joined(0)
    router.joined(1)
    chosen = [router.choose(Routed(str(number), prompt(100))) for number in range(4)]
    assert sorted(chosen) == [0, 0, 1, 1]


def test_a_thousand_replicas_are_compared_by_prefix_and_load() -> None:
    replicas = Replicas(1000)
    tokens = prompt(400)
    replicas.report(700, published=tuple(keys_of(tokens)), num_decoding=2, num_running=2)
    assert replicas.send([*tokens, 1]) == 700
    chosen = [replicas.send(prompt(100, number)) for number in range(1, 1000)]
    assert len(set(chosen)) == 999


def test_reports_can_be_pickled() -> None:
    report = IDLE._replace(tenants=(TenantWork("a", 3, 1.0),), published=(b"x" * 32,))
    assert pickle.loads(pickle.dumps(report)) == report
