"""Policies, tenants and estimates with a real engine; their options."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, FairPolicy, RequestError, SamplingParams, SchedulingPolicy
from sdk.api.config import EngineConfig

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)


def ids(seed: int, count: int = 12) -> dict:
    return {"prompt_token_ids": [(seed * 31 + i * 7) % 90 + 5 for i in range(count)]}


def tokens(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "options",
    [
        {"scheduling_policy": "fair", "tenant_weights": {"a": 3}},
        {"scheduling_policy": "priority", "prefix_eviction": "cost"},
        {"scheduling_policy": "fair", "swap_space": "1MiB", "prefix_eviction": "cost"},
    ],
)
def test_answers_are_bitwise_the_same_when_requests_are_preempted(
    tiny_path: Path, options: dict[str, Any]
) -> None:
    prompts = [ids(i, 10 + i) for i in range(12)]
    with LLM(tiny_path, max_model_len=64, max_num_seqs=1) as alone:
        expected = tokens([alone.generate(p, PARAMS)[0] for p in prompts])
    tenants = [PARAMS.clone(tenant="aaaaaabbbccc"[i], priority=-i) for i in range(12)]
    with LLM(tiny_path, max_model_len=64, max_num_seqs=3, **options) as llm:
        names = llm.enqueue(prompts[:6], tenants[:6])
        for _ in range(22):
            llm.step()
        names += llm.enqueue(prompts[6:], tenants[6:])
        outputs = llm.wait_for_completion()
        assert [output.request_id for output in outputs] == names
        assert tokens(outputs) == expected
        assert llm.get_metrics()["num_preemptions"] > 0


def test_a_weight_is_changed_from_another_thread(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, scheduling_policy="fair") as llm:
        thread = threading.Thread(target=lambda: llm.set_tenant_weight("a", 5))
        llm.generate(ids(1), PARAMS.clone(tenant="a"))
        thread.start()
        thread.join()
        policy = llm._driver._engine.scheduler.queues.policy
        assert isinstance(policy, FairPolicy) and policy.weight("a") == 5
        with pytest.raises(RequestError, match="weight of tenant 'a'"):
            llm.set_tenant_weight("a", -1)


def test_a_policy_of_ones_own_serves_an_engine(tiny_path: Path) -> None:
    class LastFirst(SchedulingPolicy):
        def order(self, request: Any) -> float:
            return -int(request.request_id)

    with LLM(tiny_path, max_model_len=64, max_num_seqs=1, scheduling_policy=LastFirst()) as llm:
        llm.enqueue([ids(i) for i in range(4)], PARAMS, request_id=list("1234"))
        ended = []
        while llm.has_unfinished_requests:
            ended += [output.request_id for output in llm.step() if output.finished]
        assert ended == list("4321")
        with pytest.raises(RequestError, match="weights need scheduling_policy='fair'"):
            llm.set_tenant_weight("a", 1)


def test_a_policy_that_fails_for_a_request_fails_only_that_one(tiny_path: Path) -> None:
    class Wrong(SchedulingPolicy):
        def order(self, request: Any) -> float:
            return "soon" if request.tenant else 0.0  # type: ignore[return-value]

    with LLM(tiny_path, max_model_len=64, scheduling_policy=Wrong()) as llm:
        with pytest.raises(ValueError, match="could not convert string to float"):
            llm.generate(ids(1), PARAMS.clone(tenant="a"))
        assert llm.generate(ids(1), PARAMS)


def test_an_estimate_comes_with_a_range_and_leaves_nothing_behind(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, max_num_seqs=2) as llm:
        assert llm.estimate(ids(1)).first_token is None
        llm.generate([ids(i, 40) for i in range(6)], PARAMS, use_tqdm=False)
        found = llm.estimate(ids(50, 30), PARAMS)
        assert 0 < found.first_token < found.finish
        assert found.first_token_range[0] <= found.first_token <= found.first_token_range[1]
        assert found.finish_range[0] <= found.finish <= found.finish_range[1]
        assert (found.num_prompt_tokens, found.num_cached_tokens, found.num_waiting) == (30, 0, 0)
        llm.enqueue([ids(60 + i) for i in range(8)], PARAMS)
        llm.step()
        later = llm.estimate(ids(51, 30), PARAMS)
        assert later.num_waiting == 6 and later.first_token > found.first_token
        assert len(llm.wait_for_completion()) == 8 and not llm.has_unfinished_requests
        with pytest.raises(RequestError, match="max_model_len"):
            llm.estimate(ids(1, 65))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tenant_weights": {"a": 1}}, "tenant_weights needs scheduling_policy='fair', found 'fc"),
        ({"scheduling_policy": "fair", "tenant_weights": [1]}, "tenant_weights: expected a mapp"),
        ({"scheduling_policy": "fair", "tenant_weights": {"a": 0}}, "weight of tenant 'a'"),
        ({"scheduling_policy": "fair", "tenant_weights": {3: 1}}, "tenant: expected a name"),
        ({"priority_aging": 5}, "priority_aging needs scheduling_policy='priority' or 'fair'"),
        ({"scheduling_policy": "priority", "priority_aging": 0}, "priority_aging: expected sec"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy: expected one of 'fcfs', 'priority', "),
        ({"scheduling_policy": SchedulingPolicy}, "scheduling_policy: expected one of"),
        ({"prefix_eviction": "mru"}, "prefix_eviction: expected one of 'lru', 'cost'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EngineConfig(model="x", **options)


def test_options_are_kept_as_they_were() -> None:
    weights = {"a": 2.0}
    config = EngineConfig(
        model="x", scheduling_policy="fair", tenant_weights=weights, priority_aging=math.inf
    )
    weights["a"] = 9.0
    assert config.tenant_weights == {"a": 2.0} and config.priority_aging == math.inf
