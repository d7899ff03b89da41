"""Some replicas compute prompts and hand keys and values over to those that make the answers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, OutOfMemoryError, RequestError, SamplingParams
from sdk.engine.scheduling.scheduler_config import WindowGroup
from sdk.memory.demand import hand_over_bytes, hand_over_ring
from tests.cluster.replicas.conftest import LIMIT_S, hurt, replicas, wait_for
from tests.models.conftest import tiny
from tests.models.tiny_architectures import ARCHITECTURES

LONG = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [
    {"prompt_token_ids": [3 + (seed * 37 + i * 11) % 400 for i in range(length)]}
    for seed, length in enumerate([100, 20, 90, 80, 110, 12])
]


@pytest.fixture
def apart(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, max_model_len=128, data_parallel_size=2, prefill_replicas=1) as llm:
        yield llm


def answers(outputs: list[Any]) -> list[Any]:
    return [(list(o.outputs[0].token_ids), o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.mark.slow
def test_long_prompts_are_handed_over_and_answers_are_the_same_bits(apart: LLM, one: LLM) -> None:
    expected = answers(one.generate(PROMPTS, LONG))
    assert answers(apart.generate(PROMPTS, LONG)) == expected
    found = apart.get_metrics()
    assert found["num_hand_overs"] == 4  # the others are too short
    assert found["num_hand_overs_failed"] == 0
    assert found["num_finished"] == len(PROMPTS)
    decoding = apart._driver.call_each([1], "", "get_metrics")[0]
    handed_over = 96 + 80 + 64 + 96  # whole pages, without the last token
    assert decoding["num_prompt_tokens_cached"] == handed_over
    # with the prefix cache of the replica that answers, nothing is handed over
    assert answers(apart.generate(PROMPTS, LONG)) == expected
    assert apart.get_metrics()["num_hand_overs"] == 4


@pytest.mark.slow
def test_the_memory_of_hand_overs_is_a_part_of_the_plan(tiny_path: Path) -> None:
    options: dict[str, Any] = {"data_parallel_size": 2, "max_model_len": 128}
    plain = LLM.plan(tiny_path, **options)
    plan = LLM.plan(tiny_path, prefill_replicas=1, **options)
    assert plan.workspace == plain.workspace + 32 * 2**20
    assert plan.total == plain.total + 2 * 32 * 2**20
    page = plan.page_bytes
    least = plan.total - 2 * (plan.num_pages - 128 // plan.page_size) * page
    assert LLM.plan(tiny_path, prefill_replicas=1, memory=least + 2 * page, **options).fits
    assert not LLM.plan(tiny_path, prefill_replicas=1, memory=least - 2 * page, **options).fits
    with LLM(tiny_path, prefill_replicas=1, memory=least + 8 * page, **options) as llm:
        smaller = llm.resize(least + 2 * page)
        assert smaller.total <= least + 2 * page and smaller.num_pages >= 128 // plan.page_size
        with pytest.raises(OutOfMemoryError, match="leave no room for 2 replicas"):
            llm.resize(2 * 32 * 2**20)


@pytest.mark.parametrize(
    ("page", "expected"), [(1, 16), (4 << 20, 16), (5 << 20, 18), (64 << 20, 192)]
)
def test_hand_overs_of_large_pages_have_more_memory(page: int, expected: int) -> None:
    """A page is read at once, and two of them fit between the replicas."""
    assert hand_over_bytes(page, 16) == 2 * expected * 2**20
    assert hand_over_ring(page) >= 2 * page


def test_hand_overs_of_windows_and_states_have_memory_for_those_of_a_request() -> None:
    window = WindowGroup(1024, 2**20, 0)  # of 65 pages
    assert hand_over_bytes(1, 16, (window,)) == 2 * (2 * 65 + 8) * 2**20
    mib = 2**20
    assert hand_over_bytes(1, 16, (), 50 * mib, 50 * mib) == 2 * (2 * 50 + 100) * mib
    # rings hold the state of a layer at a time
    assert hand_over_bytes(1, 16, (), 50 * mib, 3 * mib) == 2 * (2 * 50 + 8) * mib


def test_a_plan_counts_the_states_that_are_handed_over_as_they_travel(tmp_path: Path) -> None:
    """Mamba-2 of 1.1 MiB a layer and sequence, in 32 bits and in 16 with scales."""
    sizes = {"num_heads": 32, "head_dim": 64, "hidden_size": 1024, "state_size": 128}
    options = ARCHITECTURES["mamba2"] | sizes | {"n_groups": 1, "num_hidden_layers": 8}
    tiny("mamba2", **options).save_pretrained(tmp_path)
    apart: dict[str, Any] = {"data_parallel_size": 2, "max_model_len": 128}
    apart |= {"skip_tokenizer_init": True, "prefill_replicas": 1}
    for dtype in ("auto", "float16"):
        plan = LLM.plan(tmp_path, state_snapshot_dtype=dtype, **apart)
        slots = plan.states
        assert slots is not None
        snapshot = slots.slot_bytes if dtype == "auto" else slots.rounded_bytes
        assert plan.hand_over == 2 * (max(2 * snapshot, 8 * 2**20) + 8 * 2**20)
        assert plan.hand_over == hand_over_bytes(0, 16, (), snapshot, snapshot // 8)


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_replica_of_either_kind_costs_only_time(
    apart: LLM, one: LLM, victim: int, how: int
) -> None:
    many = PROMPTS * 4
    expected = answers(one.generate(many, LONG))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answers(apart.generate(many, LONG))))
    thread.start()
    wait_for(lambda: bool(apart._driver._requests), "requests")
    hurt(replicas(apart)[victim].pid, how)
    thread.join(LIMIT_S)
    assert found == [expected]
    wait_for(lambda: apart._driver.processes.num_ready == 2, "a new replica")
    assert answers(apart.generate(many, LONG)) == expected


@pytest.mark.slow
def test_an_abort_while_the_prompt_is_computed_elsewhere_ends_the_request(apart: LLM) -> None:
    hurt(replicas(apart)[0].pid, signal.SIGSTOP)
    apart.enqueue(PROMPTS[0], LONG, request_id="one")
    wait_for(lambda: apart._driver._requests["one"].prefill == 0, "the hand-over")
    apart.abort("one")
    ended = []
    while apart.has_unfinished_requests:
        ended += apart.step()
    assert ended[-1].outputs[0].finish_reason == "abort"


@pytest.mark.slow
def test_scores_of_a_prompt_and_short_prompts_are_computed_in_place(apart: LLM, one: LLM) -> None:
    params = LONG.clone(prompt_logprobs=0)
    [mine], [known] = apart.generate([PROMPTS[0]], params), one.generate([PROMPTS[0]], params)
    assert len(mine.prompt_logprobs) == len(known.prompt_logprobs) == 100
    assert apart.get_metrics()["num_hand_overs"] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"data_parallel_size": 2, "prefill_replicas": 2},
            "expected fewer than data_parallel_size",
        ),
        ({"prefill_replicas": 1}, "expected fewer than data_parallel_size"),
        (
            {"data_parallel_size": 2, "prefill_replicas": 1, "enable_prefix_caching": False},
            "prefill_replicas: expected enable_prefix_caching=True",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tiny_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        LLM(tiny_path, **options)
