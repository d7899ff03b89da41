"""Whole models on a card: the reference's tokens, graphs, batches, and memory given back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8], [7, 7, 7], [1, 2, 3, 4], [300]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=4, max_tokens=8, ignore_eos=True)
MODELS = ("gguf-Q8_0", "gguf-Q4_K_M", "gptq-w4-g128-act", "ct-w8a8-int8", "arch-gemma3")


def path_of(golden: Path, name: str) -> Path:
    file = golden / name / "model.gguf"
    return file if file.is_file() else golden / name


def load(path: Path, device: str, **options: Any) -> LLM:
    # a share of the card, because other processes test at the same time
    where = {"device": "cuda", "gpu_memory_utilization": 0.05} if device == "cuda" else {}
    small: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    return LLM(path, max_model_len=64, **{**where, **small, **options})


def tokens(llm: LLM, params: SamplingParams, prompts: Any = None) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(prompts or PROMPTS, params)]


@pytest.mark.parametrize("name", MODELS)
def test_exact_answers_are_the_cpu_s(golden: Path, engine_device: str, name: str) -> None:
    with LLM(path_of(golden, name), compute="exact", max_model_len=64) as llm:
        wanted = [tokens(llm, params) for params in (GREEDY, DRAWN)]
    with load(path_of(golden, name), engine_device, compute="exact") as llm:
        assert [tokens(llm, params) for params in (GREEDY, DRAWN)] == wanted
        assert llm.load_warnings == ()


@pytest.mark.parametrize("kv", ["auto", "bfloat16", "int8", "fp8", "int4"])
def test_replayed_steps_give_what_single_operators_give(
    golden: Path, engine_device: str, kv: str
) -> None:
    found = []
    for eager in (False, True):
        options = {"enforce_eager": eager, "kv_cache_dtype": kv}
        with load(path_of(golden, "gguf-Q8_0"), engine_device, **options) as llm:
            found.append(tokens(llm, GREEDY))
    assert found[0] == found[1]


def test_steps_launched_before_their_plan_give_the_same_answers(
    golden: Path, engine_device: str
) -> None:
    lengths = (40, 3, 17, 29, 8)
    params: Any = [DRAWN.clone(max_tokens=length) for length in lengths]
    found = []
    for eager in (False, True):
        options = {"enforce_eager": eager, "deterministic": True}
        with load(path_of(golden, "gguf-Q8_0"), engine_device, **options) as llm:
            assert llm._runner().strategy.steps_ahead == (engine_device == "cuda" and not eager)
            found.append(tokens(llm, params))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["gguf-Q8_0", "arch-gemma3", "gptoss-mxfp4"])
def test_steps_with_prompts_replayed_in_pieces_give_the_same_answers(
    golden: Path, engine_device: str, name: str
) -> None:
    prompts = [[(7 * n + 13 * i) % 300 + 4 for i in range(n)] for n in (21, 3, 18)]
    found = []
    for eager in (False, True):
        options = {"enforce_eager": eager, "deterministic": True, "skip_tokenizer_init": True}
        with load(path_of(golden, name), engine_device, **options) as llm:
            recorded = engine_device == "cuda" and not eager
            assert llm._runner().strategy.most_tokens_in_pieces == (32 if recorded else 0)
            found.append(tokens(llm, DRAWN, prompts))
            assert llm._runner().strategy.most_tokens_in_pieces == (32 if recorded else 0)
    assert found[0] == found[1]


def test_with_deterministic_an_answer_does_not_depend_on_its_batch(
    golden: Path, engine_device: str
) -> None:
    with load(path_of(golden, "gguf-Q4_K_M"), engine_device, deterministic=True) as llm:
        together = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
        for prompt, wanted in zip(PROMPTS, together, strict=True):
            (alone,) = llm.generate([prompt], GREEDY)
            assert list(alone.outputs[0].token_ids) == list(wanted.token_ids)
            assert alone.outputs[0].cumulative_logprob == wanted.cumulative_logprob


def test_a_closed_engine_gives_the_card_s_memory_back(golden: Path, engine_device: str) -> None:
    path = path_of(golden, "gguf-Q8_0")
    levels = []
    for _ in range(3):
        with load(path, engine_device) as llm:
            tokens(llm, GREEDY)
        levels.append(torch.cuda.memory_allocated() if engine_device == "cuda" else 0)
    assert levels[2] <= levels[0] + (1 << 20)
