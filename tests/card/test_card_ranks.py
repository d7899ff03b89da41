"""Ranks and stages on two cards over NCCL: the tokens of one card, and a rank that is lost."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, EngineDeadError, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8], [7, 7, 7], [1, 2, 3, 4], [300]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=4, max_tokens=8, ignore_eos=True)


def load(golden: Path, **options: Any) -> LLM:
    small: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    where = {"device": "cuda", "gpu_memory_utilization": 0.05}
    return LLM(golden / "gguf-Q8_0" / "model.gguf", **{**small, **where, **options})


def tokens(llm: LLM) -> list[list[int]]:
    asked = [llm.generate(PROMPTS, params) for params in (GREEDY, DRAWN)]
    return [list(output.outputs[0].token_ids) for outputs in asked for output in outputs]


@pytest.mark.parametrize("eager", [False, True], ids=["in pieces", "eagerly"])
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_cards_give_the_tokens_of_one(golden: Path, option: str, eager: bool) -> None:
    with load(golden, compute="exact") as llm:
        wanted = tokens(llm)
    with load(golden, compute="exact", enforce_eager=eager, **{option: 2}) as llm:
        assert tokens(llm) == wanted


def test_a_rank_that_is_lost_is_an_error(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # else torch ends this process
    long = SamplingParams(temperature=0.0, max_tokens=58, ignore_eos=True)
    with load(golden, tensor_parallel_size=2) as llm:
        assert not any("TORCH_NCCL" in warning for warning in llm.load_warnings)
        executor: Any = llm._driver._engine._executor
        (child,) = executor._children._children
        killer = threading.Timer(0.2, child.process.kill)
        killer.start()
        with pytest.raises(EngineDeadError, match="rank 1 was killed"):
            for _ in range(1000):
                llm.generate(PROMPTS, long)
        killer.join()
