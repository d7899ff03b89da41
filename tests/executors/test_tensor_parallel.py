"""The real runner on a tiny model: two ranks answer as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk.engine.plan import RequestStart, Sampled, StepPlan
from sdk.engine.runner import ModelRunner
from sdk.engine.runner_config import RunnerConfig
from sdk.executors.local import LocalExecutor
from sdk.executors.process import ProcessExecutor
from sdk.params import SamplingParams

PROMPTS = {"a": tuple(range(3, 40)), "b": (7, 300, 12)}


def decode(executor, steps: int) -> list[dict[str, Sampled]]:
    """Prefill ``a`` in two chunks beside ``b``, then decode both greedily."""
    params = SamplingParams(
        temperature=0, logprobs=1, prompt_logprobs=1, logits_processors=[lambda _, row: row]
    )
    started = tuple(
        RequestStart(name, ids, len(ids), 0, tuple(range(1 + 8 * i, 9 + 8 * i)), params)
        for i, (name, ids) in enumerate(PROMPTS.items())
    )
    executor.start()
    results = [executor.execute(StepPlan(0, (("a", 20), ("b", 3)), started))]
    tokens = {"b": results[0].sampled["b"].token_id}
    appended = (("b", (tokens["b"],)),)
    results.append(executor.execute(StepPlan(1, (("a", 17), ("b", 1)), appended=appended)))
    for step in range(2, steps):
        appended = tuple((name, (s.token_id,)) for name, s in results[-1].sampled.items())
        plan = StepPlan(step, (("a", 1), ("b", 1)), appended=appended)
        results.append(executor.execute(plan))
    executor.close()
    return results


@pytest.mark.parametrize("checkpoint", ["arch-llama3/hf", "gguf-Q4_0/model.gguf"])
def test_two_ranks_choose_the_tokens_of_one(golden: Path, checkpoint: str) -> None:
    config = RunnerConfig(
        str(golden / checkpoint),
        num_pages=17,
        page_size=16,
        kv_dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        num_threads=1,
        compute="exact",
    )
    one = decode(LocalExecutor(ModelRunner, config), 6)
    two = decode(ProcessExecutor(ModelRunner, config, 2), 6)
    for alone, parallel in zip(one, two, strict=True):
        assert alone.sampled.keys() == parallel.sampled.keys()
        for name, expected in alone.sampled.items():
            found = parallel.sampled[name]
            assert found.token_id == expected.token_id
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert alone.prompt_logprobs.keys() == parallel.prompt_logprobs.keys()
        for name, scores in alone.prompt_logprobs.items():
            expected = [score.logprob for score in scores]
            assert [s.logprob for s in parallel.prompt_logprobs[name]] == pytest.approx(
                expected, abs=1e-4
            )
