"""Engines of models with recurrent states: answers alone, in a batch, in chunks, after hits, with
drafts and in little memory; the plan; what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.api.errors import UnsupportedError
from tests.tiny_hybrids import HYBRIDS, tiny_hybrid

PROMPTS = [[3 + 7 * i * (k + 1) % 200 for i in range(60 + 40 * k)] for k in range(3)]
ANSWERS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
OPTIONS = {"max_model_len": 256, "dtype": "float32", "num_threads": 1, "skip_tokenizer_init": True}


@pytest.fixture(scope="module", params=HYBRIDS)
def path(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hybrid(request.param, tmp_path_factory.mktemp(request.param))


def turns(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """The answers of two turns of some conversations, and how much was cached in the second."""
    first = [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, ANSWERS)]
    more = [[*prompt, *answer, 5, 6] for prompt, answer in zip(PROMPTS, first, strict=True)]
    again = llm.generate(more, ANSWERS)
    answers = first + [list(one.outputs[0].token_ids) for one in again]
    return answers, [one.num_cached_tokens for one in again]


def test_answers_are_those_of_one_request_without_a_cache(path: Path) -> None:
    with LLM(path, enable_prefix_caching=False, max_num_seqs=1, **OPTIONS) as llm:
        expected, _ = turns(llm)
        assert len({token for answer in expected for token in answer}) > 20
        lookup = {"method": "ngram", "num_speculative_tokens": 3}
    for options in (
        {},
        {"max_num_batched_tokens": 24, "max_num_seqs": 3},
        {"speculative_config": lookup},
    ):
        with LLM(path, **OPTIONS, **options) as llm:
            answers, cached = turns(llm)
            assert answers == expected
            # a snapshot of the end of a turn: all but the last token, which did not run
            assert cached == [len(prompt) + 39 for prompt in PROMPTS]
            assert "recurrent states" in llm.explain()
    least = LLM.plan(path, **{**OPTIONS, "max_num_seqs": 1})
    nbytes = least.kv_cache + 2 * least.states.slot_bytes
    with LLM(path, kv_cache_memory_bytes=nbytes, max_num_seqs=3, **OPTIONS) as llm:
        assert turns(llm)[0] == expected


def test_requests_that_are_preempted_answer_the_same(path: Path) -> None:
    """Pages for the prompts of two requests and for parts of their answers: the later one starts
    over, from the state that it had, which is kept, or from an earlier one."""
    prompts = [[3 + 7 * i * (k + 1) % 200 for i in range(40)] for k in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    with LLM(path, enable_prefix_caching=False, max_num_seqs=1, **OPTIONS) as llm:
        expected = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params)]
    plan = LLM.plan(path, **{**OPTIONS, "max_num_seqs": 1})
    slots = plan.states.slot_bytes
    for pages, more in ((17, 3), (20, 3)):
        nbytes = pages * plan.page_bytes + more * slots
        with LLM(path, kv_cache_memory_bytes=nbytes, max_num_seqs=3, **OPTIONS) as llm:
            outputs = llm.generate(prompts, params)
            assert [list(one.outputs[0].token_ids) for one in outputs] == expected
            assert llm.get_metrics()["num_preemptions"] > 0


def test_a_plan_has_slots_for_requests_drafts_and_snapshots(path: Path) -> None:
    few, many = (LLM.plan(path, **OPTIONS, max_num_seqs=count) for count in (1, 8))
    assert few.states.slot_bytes == many.states.slot_bytes > 0
    assert many.states.num_slots - few.states.num_slots == 7 * (1 + 8)
    lookup = {"method": "ngram", "num_speculative_tokens": 3}
    drafting = LLM.plan(path, **OPTIONS, max_num_seqs=1, speculative_config=lookup)
    assert drafting.states.drafts == 3
    assert drafting.states.num_slots == few.states.num_slots + 3
    assert few.full_requests == 1 and many.full_requests == 8


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_policy": "fp16>int8", "block_size": 128}, "kv_policy: found 'float16>int8': a state"),
        ({"speculative_config": {"method": "self"}}, "speculative_config: found .*: drafts that"),
    ],
)
def test_options_that_work_with_pages_alone_are_refused(
    path: Path, options: dict, named: str
) -> None:
    with pytest.raises(RequestError, match=named):
        LLM.plan(path, max_model_len=256, **options)


def test_a_model_that_drafts_has_no_states(path: Path) -> None:
    drafting = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 2}
    with pytest.raises(UnsupportedError, match="speculative_config: model: expected one with keys"):
        LLM.plan(path, max_model_len=256, speculative_config=drafting)
