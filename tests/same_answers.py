"""Answers of a model with recurrent layers, however its requests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sdk import LLM, SamplingParams
from tests.models.conftest import prompt

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "max_model_len": 160,
    "max_num_seqs": 4,
}
PROMPTS = [prompt(count, count) for count in (70, 33, 17)]


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    return [list(found.outputs[0].token_ids) for found in llm.generate(asked, GREEDY)]


def check_answers(path: Path) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """They are the same alone, together, in chunks and after hits. Returns the answers to
    ``PROMPTS``, these prompts with their answers as next prompts, and the answers to those."""
    with LLM(path, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [answers(llm, [one])[0] for one in PROMPTS]
        assert answers(llm, PROMPTS) == alone
        turns = [[*one, *answer] for one, answer in zip(PROMPTS, alone, strict=True)]
        again = [answers(llm, [one])[0] for one in turns]
    with LLM(path, **OPTIONS) as llm:
        assert answers(llm, PROMPTS) == alone
        assert answers(llm, turns) == again
        assert llm.get_metrics()["num_prompt_tokens_cached"] >= sum(map(len, PROMPTS))
    with LLM(path, **OPTIONS, max_num_batched_tokens=16) as llm:
        assert answers(llm, PROMPTS) == alone
    return alone, turns, again
