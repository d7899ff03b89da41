"""A mixture of experts as an application sees it: gpt-oss with packed experts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdk import LLM, SamplingParams
from sdk.memory.demand import ENGINE_BYTES, ENGINE_WORD_BYTES, SCORED_BYTES
from tests.models.conftest import prompt


@pytest.fixture(scope="module")
def llm(golden: Path) -> Iterator[LLM]:
    path = golden / "gptoss-mxfp4"
    limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8}
    with LLM(path, skip_tokenizer_init=True, num_threads=2, **limits) as opened:
        yield opened


def test_a_step_with_experts_is_one_recorded_graph(llm: LLM) -> None:
    assert "replayed from one recorded graph" in llm.explain()


def test_explain_names_the_kernel_of_all_experts_once(llm: LLM) -> None:
    lines = [line for line in llm.explain().splitlines() if "mlp.experts" in line]
    assert len(lines) == 1
    assert "mxfp4" in lines[0]
    assert "4 x model.layers.0.mlp.experts.gate_up_proj" in lines[0]


def test_the_plan_counts_the_rows_of_the_experts(llm: LLM) -> None:
    tokens, hidden, width, experts, vocab = 32, 128, 128, 2, 448
    rows = 6 * hidden + 3 * width + experts * (3 * width + hidden)
    engine, logits = ENGINE_BYTES + ENGINE_WORD_BYTES * vocab, 8 * vocab * 4 + SCORED_BYTES
    assert llm.memory_plan.workspace == engine + tokens * rows * 4 + logits
    assert llm.memory_plan.weights < 700_000


def test_an_answer_is_the_same_alone_in_a_batch_and_chunked(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt(length, length)} for length in (70, 3, 21, 40)]
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    alone = [llm.generate([one], params)[0].outputs[0].token_ids for one in prompts]
    assert together == alone
