"""A tiny model that answers two prompts, on whatever executor it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdk.api.params import SamplingParams
from sdk.engine.plan import RequestStart, SequenceSpec, StepPlan, StepResult, StepRow
from sdk.engine.rank.runner_config import RunnerConfig

PROMPTS = {"a": tuple(range(3, 40)), "b": (7, 300, 12)}


def decode(
    executor: Any, steps: int, drafts: dict[int, tuple[int, ...]] | None = None
) -> list[StepResult]:
    """Prefill ``a`` in two chunks beside ``b``, then decode both greedily; the results.

    ``drafts``: those behind the token of ``b``, by step.
    """
    params = SamplingParams(
        temperature=0, logprobs=1, prompt_logprobs=1, logits_processors=[lambda _, row: row]
    )
    started = tuple(
        RequestStart(
            SequenceSpec(name, params), ids, len(ids), 0, tuple(range(1 + 8 * i, 9 + 8 * i))
        )
        for i, (name, ids) in enumerate(PROMPTS.items())
    )
    executor.start()
    results: list[StepResult] = []
    for step in range(steps):
        num, outputs = [(20, 0), (17, 1), (1, 1)][min(step, 2)]
        guesses = (drafts or {}).get(step, ())
        more = len(guesses)
        rows = (
            StepRow("a", num, outputs),
            StepRow("b", (1 if step else 3) + more, 1 + more, guesses),
        )
        executor.launch(StepPlan(step, rows, () if step else started))
        results.append(executor.result())
    executor.close()
    return results


def config_of(path: Path, **options: Any) -> RunnerConfig:
    return RunnerConfig(
        str(path),
        **{
            "num_pages": 17,
            "page_size": 16,
            "kv_dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "num_threads": 1,
            "max_draft_tokens": 3,
            "compute": "exact",
            **options,
        },
    )
