"""What the memory plan promises is what the scheduler does."""

from __future__ import annotations

from pathlib import Path

import pytest

import sdk
from sdk import LLM, SamplingParams
from sdk.loaders.open import open_checkpoint
from sdk.memory import PACKING
from sdk.quant.at_load import packed_at_load


@pytest.mark.parametrize("max_model_len", [64, 50])
def test_the_plans_full_length_requests_run_at_once_and_undisturbed(
    tiny_path: Path, max_model_len: int
) -> None:
    limits = {"max_model_len": max_model_len, "max_num_seqs": 6, "max_num_batched_tokens": 512}
    with LLM(tiny_path, **limits) as llm:
        assert llm.memory_plan.num_pages == 6 * 4
        assert llm.memory_plan.full_requests == 6
        prompts = [{"prompt_token_ids": [3 + i] * (max_model_len - 3)} for i in range(6)]
        llm.enqueue(prompts, SamplingParams(max_tokens=None, ignore_eos=True, temperature=0))
        llm.step()
        assert llm.get_metrics()["num_running"] == 6
        outputs = llm.wait_for_completion()
        assert all(len(o.outputs[0].token_ids) == 3 for o in outputs)
        assert llm.get_metrics()["num_preemptions"] == 0


def test_a_context_that_ends_within_a_page_needs_all_of_it(tiny_path: Path) -> None:
    page = LLM.plan(tiny_path).page_bytes
    plan = LLM.plan(tiny_path, max_model_len=17, kv_cache_memory_bytes=3 * page)
    assert (plan.num_pages, plan.full_requests) == (3, 1.5)


def test_weights_that_grow_at_load_are_planned_as_they_are_held(golden: Path) -> None:
    """IQ3_S takes 3.44 bits per weight in the file and 4.31 in memory."""
    path = golden / "gguf-IQ3_S" / "model.gguf"
    entries = open_checkpoint(path).entries()
    assert {entry.format for entry in entries if entry.held is not None} == {"IQ3_S"}
    held = sum(entry.nbytes if entry.held is None else entry.held for entry in entries)
    assert held > 1.1 * sum(entry.nbytes for entry in entries)
    assert LLM.plan(path).weights == int(held * PACKING)


def test_a_gguf_files_attn_output_is_no_head_where_it_is_packed_at_load(
    tiny_path: Path, tmp_path: Path
) -> None:
    """``int4`` packs the head in 8 bits and the blocks in 4, also the one GGUF calls output."""
    path = sdk.quantize(tiny_path, tmp_path / "float.gguf", "f16")
    entries = packed_at_load(open_checkpoint(path), "hqq-w4g32-h8").entries()
    bits = {entry.name: entry.held * 8 / entry.num_elements for entry in entries if entry.held}
    assert bits["blk.0.attn_output.weight"] == bits["blk.0.attn_q.weight"] == 5.0
    assert bits["output.weight"] > 8
