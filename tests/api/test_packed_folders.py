"""Folders of packed layers as whole engines: recorded steps, the plan's memory, and its words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sdk import LLM, SamplingParams
from sdk.loaders.open import open_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (7 * i + 11 * j) % 400 for j in range(9)]} for i in range(3)]
#: Columns sorted by group, zero points per group, words along the other side, tables.
NAMES = ("gptq-w4-g128-act", "gptq-w3-g128-asym", "awq-gemm", "ct-nvfp4a16", "bnb-nf4")
#: Others whose bytes in memory are counted.
SCALED = ("ct-w4a16-asym", "ct-mxfp4a16", "ct-fp8-dynamic", "ct-w8a8-int8", "torchao-int8wo")
PLAIN = ("F32", "F16", "BF16")


@pytest.fixture(params=NAMES)
def open_llm(request: pytest.FixtureRequest, golden: Path) -> Callable[..., LLM]:
    def opened(**options: bool) -> LLM:
        path = golden / request.param
        return LLM(path, skip_tokenizer_init=True, max_model_len=64, **options)

    return opened


def test_a_recorded_step_gives_the_tokens_of_an_eager_one(open_llm: Callable[..., LLM]) -> None:
    with open_llm() as llm:
        found = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
        alone = [list(o.outputs[0].token_ids) for p in PROMPTS for o in llm.generate(p, GREEDY)]
        words = llm.explain()
    assert alone == found
    assert "replayed from one recorded graph" in words
    assert "warning" not in words
    with open_llm(enforce_eager=True) as llm:
        assert [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)] == found


@pytest.mark.parametrize(
    "name", [*NAMES, *SCALED, "gptq-w8-g128", "gptq-v2-w4-g64-asym", "awq-gemv"]
)
def test_packed_layers_take_no_more_memory_than_their_file(golden: Path, name: str) -> None:
    path = golden / name
    with LLM(path, skip_tokenizer_init=True, max_model_len=64) as llm:
        runner = llm._runner()
        assert runner is not None
        weights = [linear.weight for _, linear in runner.model.linears()]
        loaded = sum(weight.nbytes for weight in weights if str(weight.spec).upper() not in PLAIN)
    entries = open_checkpoint(path).entries()
    stored = sum(entry.nbytes for entry in entries if entry.format not in PLAIN)
    assert 0.9 * stored < loaded <= 1.03 * stored
    assert LLM.plan(path, max_model_len=64).weights >= loaded
