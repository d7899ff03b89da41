"""A KV cache in one allocation, as on a GPU: asleep it is gone, with all that points into it.

On a card made of the CPU's kernels (``fake_card.py``), whose cache is told to return no pages.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_card import on_a_card

from sdk import LLM, OutOfMemoryError, RequestError, SamplingParams
from sdk.engine.rank.kv_cache import KVCache

PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8], [7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
PARAMS = SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=24, ignore_eos=True)
OPTIONS = {"max_model_len": 96, "max_num_batched_tokens": 8, "max_num_seqs": 4}


@pytest.fixture(autouse=True)
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "can_vacate", property(lambda self: False))


@pytest.fixture
def path(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"swap_space": "1MiB"}, {"kv_cache_dtype": "int4"}],
    ids=["plain", "with a swap space", "with centres of keys"],
)
def test_asleep_nobody_holds_the_cache_and_awake_the_answers_are_the_same(
    path: Path, options: dict[str, str]
) -> None:
    with on_a_card(path, **OPTIONS, **options) as (llm, _):
        expected = answers(llm)
        memory = weakref.ref(llm._runner().kv._memories[0].places)
        llm.sleep()
        gc.collect()
        assert memory() is None
        llm.wake_up()
        assert answers(llm) == expected
        llm.sleep()
        llm.close()


def eventually(holds: Callable[[], bool]) -> bool:
    for _ in range(2000):
        if holds():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_trim_gives_back_the_recorded_steps_of_an_idle_engine(path: Path) -> None:
    with on_a_card(path, **OPTIONS) as (llm, card):
        expected, graphs = answers(llm), card.graphs
        assert card.in_pools()
        llm.trim()
        gc.collect()
        assert card.in_pools() == set()
        assert answers(llm) == expected
        assert eventually(lambda: card.graphs == 2 * graphs)  # captured again when it was idle
        found: list[int] = []
        llm.enqueue(PROMPTS[0], PARAMS)
        while len(found) < len(expected[0]):
            for output in llm.step():  # all tokens so far
                found = list(output.outputs[0].token_ids)
            if 1 < len(found) < 12:
                llm.trim()
                assert card.in_pools()  # what is at work stays recorded
        assert found == expected[0]


def test_an_engine_that_records_nothing_sleeps_too(path: Path) -> None:
    with LLM(path, enforce_eager=True, **OPTIONS) as llm:
        expected = answers(llm)
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == expected
        assert llm._runner().strategy.eager_reason == "enforce_eager"


def test_an_llm_whose_pages_cannot_be_had_again_sleeps_on_until_they_can(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(path, **OPTIONS) as llm:
        expected = answers(llm)
        llm.sleep()
        with monkeypatch.context() as full:
            full.setattr(torch, "from_numpy", _nothing_left)
            with pytest.raises(OutOfMemoryError, match="bytes for KV pages"):
                llm.wake_up()
        with pytest.raises(RequestError, match=r"sleeps \(level 1\)"):
            llm.generate([5, 6])
        llm.wake_up()
        assert answers(llm) == expected


def _nothing_left(array: object) -> torch.Tensor:
    raise OutOfMemoryError("4096 bytes for KV pages: nothing left")


def test_trim_and_sleep_have_torch_return_what_it_keeps_of_a_gpus_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned: list[bool] = []
    with LLM(path, **OPTIONS) as llm:
        runner = llm._runner()
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append(True))
        llm.trim()
        assert not returned  # a CPU's tensors are not torch's to keep
        monkeypatch.setattr(runner.ops, "device", torch.device("cuda"))
        llm.trim()
        assert len(returned) == 1
        llm.sleep()
        assert len(returned) == 3
        monkeypatch.undo()
