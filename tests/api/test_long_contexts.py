"""What stands once in a long prompt is found again, with every type of keys and values.

tests/memory/long_contexts.py does this with 131,072 tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, SamplingParams
from sdk.kernels.kv.kv_types import KV_TYPES
from tests import needles

TOKENS = 3_000
AT = [1, 127, 1_000, 1_023, 2_048, 2_700, 2_936, 2_995]
PROMPT = needles.haystack(TOKENS, AT)
QUESTIONS = [[*PROMPT, needles.needle(number)[0]] for number in range(needles.NEEDLES)]
ANSWERS = [needles.needle(number)[1:] for number in range(needles.NEEDLES)]
COPY = SamplingParams(temperature=0, max_tokens=needles.LENGTH - 1, ignore_eos=True, logprobs=1)
OPTIONS: dict[str, Any] = {
    "max_model_len": 4_096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_threads": 2,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return needles.copying_llama(tmp_path_factory.mktemp("copying") / "llama", 4_096)


def copies(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[Any]]]:
    """The tokens of each answer, and their log-probabilities."""
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    found = [one.outputs[0] for one in llm.generate(asked, COPY, use_tqdm=False)]
    return [(list(one.token_ids), list(one.logprobs or ())) for one in found]


@pytest.mark.parametrize("kv", [*KV_TYPES, "k8v4", "fp8/int4"])
def test_needles_are_copied_together_alone_and_after_a_file(
    folder: Path, tmp_path: Path, kv: str
) -> None:
    with LLM(folder, kv_cache_dtype=kv, **OPTIONS) as llm:
        found = copies(llm, QUESTIONS)
        assert [tokens for tokens, _ in found] == ANSWERS
        for tokens, known in found:
            assert all(one[token].logprob > -0.01 for token, one in zip(tokens, known, strict=True))
        assert [copies(llm, [one])[0] for one in QUESTIONS] == found
        llm.snapshot({"prompt_token_ids": PROMPT}).save(tmp_path / "context.kv")
    with LLM(folder, kv_cache_dtype=kv, **OPTIONS) as llm:
        kept = llm.restore(tmp_path / "context.kv")
        assert kept == TOKENS // 16 * 16
        assert copies(llm, QUESTIONS) == found
        assert llm.get_metrics()["num_prompt_tokens_cached"] >= kept * len(QUESTIONS)


def test_what_the_prompt_does_not_hold_is_not_copied(folder: Path) -> None:
    """An answer comes from the prompt, not from the weights."""
    without = needles.haystack(TOKENS, AT[1:])  # the last needle is missing
    with LLM(folder, **OPTIONS) as llm:
        [(tokens, known)] = copies(llm, [[*without, needles.needle(len(AT) - 1)[0]]])
    assert tokens != ANSWERS[-1]
    assert known[0][tokens[0]].logprob < -0.1


def test_transformers_copies_the_same(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = needles.haystack(400, [40 * n + 1 for n in range(needles.NEEDLES)])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = torch.tensor([[*prompt, needles.needle(n)[0]] for n in range(needles.NEEDLES)])
    with torch.no_grad():
        found = model(asked).logits[:, -1].argmax(dim=-1)
    assert found.tolist() == [answer[0] for answer in ANSWERS]
