"""Replicas that run their steps together and share the experts: data parallel attention."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sdk.testing.tiny_models as tiny_models
from sdk import LLM, AlignmentError, LoRARequest, RequestError, RequestOutput, SamplingParams
from tests.cluster.replicas.conftest import LIMIT_S, children, hurt, replicas, wait_for

SMALL: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 8}
SMALL["enable_prefix_caching"] = False
TOGETHER: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, logprobs=1)


def ids(seed: int, length: int) -> dict[str, Any]:
    return {"prompt_token_ids": [5 + (seed * 37 + i * 11) % 370 for i in range(length)]}


PROMPTS = [ids(seed, 3 + 17 * seed % 90) for seed in range(10)]


def answers(outputs: list[RequestOutput]) -> list[Any]:
    """Tokens and the bits of their log-probabilities."""
    found = [output.outputs[0] for output in outputs]
    return [(list(one.token_ids), one.cumulative_logprob) for one in found]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file with five experts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models._EXPERTS, "count", 5)
        return tiny_models.tiny_model(tmp_path_factory.mktemp("experts"), "q8_0", "mixtral")


@pytest.fixture(scope="module")
def together(mixtral: Path) -> Iterator[LLM]:
    """Two replicas; two of the five experts are on both."""
    with LLM(mixtral, num_threads=2, num_redundant_experts=2, **TOGETHER, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(mixtral: Path) -> Iterator[LLM]:
    with LLM(mixtral, num_threads=2, **SMALL) as llm:
        yield llm


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_answers_have_the_bits_of_one_engine(
    together: LLM, alone: LLM, params: SamplingParams
) -> None:
    assert answers(together.generate(PROMPTS, params)) == answers(alone.generate(PROMPTS, params))


def test_a_replica_without_requests_computes_its_experts(together: LLM, alone: LLM) -> None:
    for prompt in PROMPTS[:3]:
        found, expected = together.generate(prompt, GREEDY), alone.generate(prompt, GREEDY)
        assert answers(found) == answers(expected)


def test_each_replica_computes_some_experts_for_the_tokens_of_both(together: LLM) -> None:
    """All count the tokens of all: rows are assigned to the copies of experts by the counts."""
    together.rebalance_experts()
    together.generate(PROMPTS, GREEDY)
    layers, per_token = 2, 2
    tokens = sum(len(p["prompt_token_ids"]) for p in PROMPTS) + len(PROMPTS) * 23
    loads = [together._driver.call_one(number, "", "expert_load") for number in (0, 1)]
    assert loads[0] == loads[1] == together.expert_load()
    assert len(loads[0]) == layers
    assert {sum(one) for one in loads[0].values()} == {tokens * per_token}


@pytest.mark.slow
def test_experts_move_between_two_steps_of_running_requests(mixtral: Path, alone: LLM) -> None:
    expected = answers(alone.generate(PROMPTS, DRAWN))
    with LLM(mixtral, num_threads=2, num_redundant_experts=1, **TOGETHER, **SMALL) as llm:
        llm.generate(PROMPTS, GREEDY)
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.extend(answers(llm.generate(PROMPTS, DRAWN)))
        )
        thread.start()
        moved = [llm.rebalance_experts() for _ in range(3)]
        thread.join(LIMIT_S)
        assert found == expected
        assert sum(moved) > 0, "nothing was balanced"
        assert answers(llm.generate(PROMPTS, DRAWN)) == expected


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_three_replicas_with_one_thread_each(mixtral: Path, alone: LLM, eager: bool) -> None:
    options = {**TOGETHER, "data_parallel_size": 3, "enforce_eager": eager}
    with LLM(mixtral, num_threads=3, **options, **SMALL) as llm:
        found = answers(llm.generate(PROMPTS, GREEDY))
        assert found == answers(alone.generate(PROMPTS, GREEDY))
        assert "replicas   3" in str(llm.explain())


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_replicas_are_lost_and_replaced_together(mixtral: Path, alone: LLM, how: int) -> None:
    expected = answers(alone.generate(PROMPTS, DRAWN))
    before = children()
    with LLM(mixtral, num_threads=2, **TOGETHER, **SMALL) as llm:
        old = {one.pid for one in replicas(llm)}
        found: list[Any] = []
        thread = threading.Thread(
            target=lambda: found.extend(answers(llm.generate(PROMPTS, DRAWN)))
        )
        thread.start()
        wait_for(
            lambda: any(one.replica >= 0 for one in list(llm._driver._requests.values())),
            "a running request",
        )
        hurt(replicas(llm)[1].pid, how)
        thread.join(LIMIT_S)
        assert found == expected
        wait_for(lambda: llm._driver.processes.num_ready == 2, "new replicas")
        assert not old & {one.pid for one in replicas(llm)}
        assert answers(llm.generate(PROMPTS, DRAWN)) == expected
    assert not children() - before


@pytest.mark.slow
def test_a_replica_that_sleeps_wakes_up_with_the_others(mixtral: Path, alone: LLM) -> None:
    expected = answers(alone.generate(PROMPTS, GREEDY))
    with LLM(mixtral, num_threads=2, **TOGETHER, **SMALL) as llm:
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert answers(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.slow
def test_replicas_that_sleep_are_lost_and_run_what_is_pinned(mixtral: Path, alone: LLM) -> None:
    """They run it at the same time, and sleep again at different times."""
    expected = answers(alone.generate(PROMPTS, GREEDY))
    options = {**SMALL, **TOGETHER, "enable_prefix_caching": True}
    with LLM(mixtral, num_threads=2, **options) as llm:
        llm.pin(ids(3, 200)["prompt_token_ids"])
        llm.pin(ids(4, 100)["prompt_token_ids"])
        llm.sleep(1)
        for times in range(1, 4):
            hurt(replicas(llm)[0].pid)
            wait_for(lambda n=times: llm._driver.processes.num_replaced == 2 * n, "replacements")
            wait_for(lambda: llm._driver.processes.num_ready == 2, "new replicas")
        llm.wake_up()
        assert answers(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_adapters_and_structures_run_in_lockstep(
    mixtral: Path, tmp_path: Path, eager: bool
) -> None:
    """An adapter has the tokens of its own replica, the experts those of all."""
    generator = torch.Generator().manual_seed(1)
    key = "base_model.model.model.layers.1.self_attn.q_proj"
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {
            f"{key}.lora_A.weight": torch.randn(4, 256, generator=generator),
            f"{key}.lora_B.weight": torch.randn(256, 4, generator=generator),
        },
        tmp_path / "adapter_model.safetensors",
    )
    adapter = LoRARequest("one", 1, str(tmp_path))
    which = [adapter, None, None, adapter, None, adapter, None, None, adapter, None]
    params = [GREEDY, DRAWN.clone(structured_outputs={"regex": "[ab]{3,30}"}), DRAWN] * 3 + [GREEDY]
    options = {**SMALL, "num_threads": 2, "enable_lora": True, "enforce_eager": eager}
    with LLM(mixtral, **options) as llm:
        plain = answers(llm.generate(PROMPTS, params))
        expected = answers(llm.generate(PROMPTS, params, lora_request=which))
    assert plain != expected
    with LLM(mixtral, **TOGETHER, **options) as llm:
        assert answers(llm.generate(PROMPTS, params, lora_request=which)) == expected


def test_the_plan_counts_the_tokens_of_all_replicas(mixtral: Path) -> None:
    """Each replica has room for the rows of all: 2 experts and 2 areas of the exchange."""
    plans = [
        LLM.plan(mixtral, **{**TOGETHER, **SMALL, "data_parallel_size": count, **more})
        for count, more in ((2, {"enable_expert_parallel": False}), (2, {}), (3, {}))
    ]
    plain, two, three = (plan.workspace for plan in plans)
    exchanged = 2 * 4 * 32 * 2 * 256  # bytes of 32 tokens of one replica: hidden size 256
    assert two - plain > 2 * exchanged
    assert three - two > exchanged


@pytest.mark.slow
def test_what_lockstep_cannot_do_is_refused(mixtral: Path, golden: Path) -> None:
    with pytest.raises(RequestError, match=r"expected pipeline_parallel_size=1"):
        LLM(mixtral, pipeline_parallel_size=2, **TOGETHER)
    with pytest.raises(RequestError, match=r"expected prefill_replicas=0"):
        LLM(mixtral, prefill_replicas=1, **TOGETHER)
    with pytest.raises(RequestError, match="method 'self'"):
        LLM(mixtral, speculative_config={"method": "self"}, **TOGETHER)
    with pytest.raises(RequestError, match="expected a mixture of experts"):
        LLM(golden / "gguf-Q8_0" / "model.gguf", **TOGETHER)
    with pytest.raises(AlignmentError, match="cannot spread 5 experts over 6 ranks"):
        LLM(mixtral, **{**TOGETHER, "data_parallel_size": 6})
    with pytest.raises(RequestError, match="num_redundant_experts"):
        LLM(mixtral, data_parallel_size=2, num_redundant_experts=2)
