"""Exact values of an engine's histograms and counts, on a clock that the test moves."""

from __future__ import annotations

import math
import random

import pytest

from sdk import RequestError, SamplingParams
from sdk.engine.recorder import MAX_LABELS, OTHER, Rates
from sdk.testing import FakeAnswer, FakeLLM, ManualClock

FIRST, EACH = 0.1, 0.01  # seconds


@pytest.fixture
def clock():
    return ManualClock(1000.0)


@pytest.fixture
def make(clock):
    made = []

    def build(answers="one two three four", **options):
        times = {"seconds_per_token": EACH, "seconds_to_first_token": FIRST}
        llm = FakeLLM(answers, clock=clock, sleep=clock.sleep, **{**times, **options})
        made.append(llm)
        return llm

    yield build
    for llm in made:
        llm.close()


def test_the_times_of_one_request(make):
    """Four words and the end: the first token after 0.11 s, then one every 0.01 s."""
    llm = make()
    llm.generate(["hello there"], use_tqdm=False)
    stats = llm.stats()
    requests = stats.requests
    assert requests.ttft.sum == pytest.approx(FIRST + EACH)
    assert requests.queue_time.sum == 0
    assert requests.prefill_time.sum == pytest.approx(FIRST + EACH)
    assert requests.decode_time.sum == pytest.approx(4 * EACH)
    assert requests.inference_time.sum == requests.e2e.sum == pytest.approx(FIRST + 5 * EACH)
    assert requests.tpot.sum == pytest.approx(EACH)
    assert (requests.prompt_tokens.sum, requests.generation_tokens.sum) == (2, 5)
    assert stats.inter_token_latency.count == 4
    assert stats.inter_token_latency.sum == pytest.approx(4 * EACH)
    assert stats.step_seconds.count == 5
    assert stats.step_seconds.sum == pytest.approx(FIRST + 5 * EACH)
    assert stats.step_tokens.sum == 2 + 4
    assert requests.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0, "deadline": 0}
    assert (requests.num_finished, requests.num_unfinished) == (1, 0)
    assert requests.slo_attainment == 1.0


def test_requests_of_one_step_share_an_interval_and_a_late_one_has_its_own(make):
    llm = make()
    llm.enqueue(["a", "b", "c"], SamplingParams(max_tokens=3))
    llm.step()
    llm.step()
    assert llm.stats().inter_token_latency.count == 3
    llm.enqueue("d", SamplingParams(max_tokens=3))
    llm.wait_for_completion()
    between = llm.stats().inter_token_latency
    assert between.count == 4 * 2
    # the third step of the first three also began the prompt of the fourth
    assert between.sum == pytest.approx(3 * EACH + 3 * (EACH + FIRST) + 2 * EACH)


def test_a_preempted_request_counts_its_wait_between_two_tokens(make):
    """The engine is interrupted: its request starts over, and its next token comes late."""
    llm = make()
    llm.enqueue("a", SamplingParams(max_tokens=3))
    llm.step()
    llm._driver.between_steps(llm._driver.engine.scheduler.queues.preempt_last)
    llm.wait_for_completion()
    stats = llm.stats()
    assert stats.inter_token_latency.count == 2
    assert stats.inter_token_latency.sum == pytest.approx(2 * EACH + FIRST)
    assert llm.get_metrics()["num_preemptions"] == 1


def test_finish_reasons_are_counted(make):
    answers = [FakeAnswer("x"), FakeAnswer("x", error=ValueError("no")), FakeAnswer("x y z")]
    llm = make(answers, seconds_to_first_token=0.0)
    params = SamplingParams(max_tokens=8)
    llm.generate(["1", "2"], params, use_tqdm=False)
    llm.generate("3", SamplingParams(max_tokens=1), use_tqdm=False)
    finished = llm.stats().requests.finished
    assert (finished["stop"], finished["error"], finished["length"]) == (1, 1, 1)
    numbers = llm.get_metrics()
    assert numbers["num_finished_error"] == 1 and numbers["num_finished"] == 3


def test_an_aborted_request_counts_once_and_never_as_good(make):
    llm = make()
    llm.set_slo("e2e=100")
    [name] = llm.enqueue("a", SamplingParams(max_tokens=100))
    llm.step()
    assert llm.stats().requests.num_unfinished == 1
    llm.abort(name)
    llm.step()
    requests = llm.stats().requests
    assert (requests.finished["abort"], requests.num_unfinished) == (1, 0)
    assert (requests.num_judged, requests.num_within_slo) == (1, 0)


def test_answers_within_the_slo_are_counted_from_then_on(make):
    llm = make()
    llm.generate("before", use_tqdm=False)
    llm.set_slo(f"ttft={FIRST + 2 * EACH}")
    llm.generate(["a", "b"], use_tqdm=False)
    llm.set_slo(f"ttft={FIRST / 2}")
    llm.generate("c", use_tqdm=False)
    requests = llm.stats().requests
    assert (requests.num_within_slo, requests.num_judged) == (2, 3)
    assert requests.slo_attainment == 2 / 3 == llm.get_metrics()["slo_attainment"]


def test_each_answer_of_a_request_counts(make):
    llm = make()
    llm.generate("a b c", SamplingParams(n=3), use_tqdm=False)
    requests = llm.stats().requests
    assert requests.num_finished == requests.ttft.count == requests.e2e.count == 3
    assert llm.get_metrics()["num_finished"] == 1


def test_tenants_are_counted_separately_and_only_so_many(make):
    llm = make("x", seconds_to_first_token=0.0)
    llm.generate("a", SamplingParams(tenant="acme"), use_tqdm=False)
    llm.generate(["b", "c"], SamplingParams(tenant="zeta"), use_tqdm=False)
    llm.generate("d", use_tqdm=False)
    stats = llm.stats()
    assert {name: one.num_finished for name, one in stats.by_tenant.items()} == {
        "acme": 1,
        "zeta": 2,
    }
    assert stats.requests.num_finished == 4 and stats.by_adapter == {}
    assert stats.by_tenant["zeta"].generation_tokens.sum == 4
    for number in range(MAX_LABELS + 5):
        llm.generate("e", SamplingParams(tenant=f"t{number}"), use_tqdm=False)
    by_tenant = llm.stats().by_tenant
    assert len(by_tenant) == MAX_LABELS + 1
    assert by_tenant[OTHER].num_finished == 2 + 5


def test_an_embedding_has_no_tokens_but_a_time(make):
    llm = make()
    llm.embed(["some words here"], use_tqdm=False)
    requests = llm.stats().requests
    assert requests.num_finished == requests.prefill_time.count == requests.e2e.count == 1
    assert requests.ttft.count == requests.tpot.count == requests.generation_tokens.count == 0
    assert requests.prompt_tokens.sum == 3


def test_prompt_tokens_are_counted_as_vllm_counts_them(make):
    llm = make("x", seconds_to_first_token=0.0)
    prompt = " ".join(f"w{number}" for number in range(40))
    llm.generate(prompt, use_tqdm=False)
    llm.generate(prompt, use_tqdm=False)
    numbers = llm.get_metrics()
    assert numbers["num_prompt_tokens_queried"] == 80
    assert 0 < numbers["num_prompt_tokens_cached"] < 40
    assert numbers["num_prompt_tokens"] == 80 - numbers["num_prompt_tokens_cached"]


def test_rates_are_those_of_the_last_ten_seconds(make, clock):
    llm = make("one two three", seconds_per_token=0.25, seconds_to_first_token=0.0)
    llm.generate("a b", use_tqdm=False)  # ends after one second
    numbers = llm.get_metrics()
    assert numbers["generation_tokens_per_second"] == pytest.approx(4 / 1.0)
    assert numbers["prompt_tokens_per_second"] == pytest.approx(2 / 1.0)
    clock.sleep(4.0)
    llm.set_slo("e2e=2")
    llm.generate("c d", use_tqdm=False)  # from second 5 to second 6
    numbers = llm.get_metrics()
    assert numbers["generation_tokens_per_second"] == pytest.approx(8 / 6.0)
    assert numbers["requests_per_second"] == pytest.approx(2 / 6.0)
    assert numbers["goodput"] == pytest.approx(1 / 6.0)
    clock.sleep(6.5)  # second 12.5: the window began with second 3
    assert llm.get_metrics()["generation_tokens_per_second"] == pytest.approx(4 / 9.5)
    clock.sleep(60)
    assert llm.get_metrics()["generation_tokens_per_second"] == 0


def test_rates_forget_nothing_that_is_in_the_window():
    rates, now, total = Rates(0.0), 0.0, 0
    for _ in range(400):
        now += 0.25
        if now >= rates.ends:
            rates.roll(now, total)
        total += 1
    [rate] = rates.read(now, total)
    begin = int(now) + 1 - 10
    assert rate == pytest.approx((total - 4 * begin + 1) / (now - begin))


def test_the_flat_numbers_are_finite_before_anything_ran(make):
    numbers = make().get_metrics()
    assert all(math.isfinite(value) for value in numbers.values())
    assert numbers["ttft_p99"] == numbers["kv_usage"] == 0


def test_the_share_of_pages_in_use(make):
    llm = make(max_model_len=64, max_num_seqs=2)  # 8 pages of 16
    llm.enqueue("a b c", SamplingParams(max_tokens=4))
    llm.step()
    assert llm.get_metrics()["kv_usage"] == 1 / 8
    llm.wait_for_completion()
    assert llm.get_metrics()["kv_usage"] == 0


def test_a_closed_llm_has_no_stats(make):
    llm = make()
    llm.close()
    for method in (llm.stats, llm.list_requests, llm.get_metrics):
        with pytest.raises(Exception, match="closed"):
            method()


def test_a_request_that_was_rejected_does_not_count(make):
    llm = make()
    with pytest.raises(RequestError):
        llm.generate(" ".join(["w"] * 9000), use_tqdm=False)
    requests = llm.stats().requests
    assert requests.num_unfinished == requests.num_finished == 0


@pytest.mark.parametrize("seed", range(8))
def test_every_token_after_the_first_has_one_interval_whatever_happens(make, seed):
    """Requests come, are preempted and aborted at random; the sums agree with their tokens."""
    chance = random.Random(seed)
    llm = make(lambda prompt: "w " * chance.randrange(1, 9), max_num_seqs=4)
    queues = llm._driver.engine.scheduler.queues
    outputs, open_ids, number = {}, [], 0
    for _ in range(60):
        act = chance.randrange(8)
        if act < 3:
            number += 1
            params = SamplingParams(n=chance.randrange(1, 3), max_tokens=chance.randrange(1, 7))
            open_ids += llm.enqueue(f"{number} x y", params, request_id=f"r{number}")
        elif act == 3 and queues.running:
            llm._driver.between_steps(queues.preempt_last)
        elif act == 4 and open_ids:
            llm.abort(chance.choice(open_ids))
        else:
            outputs |= {output.request_id: output for output in llm.step()}
    outputs |= {output.request_id: output for output in llm.wait_for_completion()}
    answers = [answer for output in outputs.values() for answer in output.outputs]
    lengths = [len(answer.token_ids) for answer in answers]
    stats = llm.stats()
    assert stats.inter_token_latency.count == sum(max(length - 1, 0) for length in lengths)
    assert stats.requests.ttft.count == sum(length > 0 for length in lengths)
    assert stats.requests.generation_tokens.sum == sum(lengths)
    assert stats.requests.num_finished == len(answers) == stats.requests.e2e.count
    assert stats.requests.num_unfinished == 0
    assert stats.longest_answer.count == len(outputs)
    for answer in answers:
        assert answer.finish_reason in stats.requests.finished
    whole = sum(output.timeline.events[-1].ts for output in outputs.values())
    assert math.isfinite(whole)
