"""Embeddings in place of token ids give the answers of the tokens they belong to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk import LLM, RequestError, SamplingParams
from tests.api.engines import SHORT, ids, tokens

OPTIONS: dict[str, Any] = {"max_model_len": 128, "enable_prompt_embeds": True}
PROMPTS = [ids(1, 5), ids(2, 70), ids(3, 33)]
DRAWN = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["gguf-Q8_0/model.gguf", "arch-gemma3/hf"])
def path(request: pytest.FixtureRequest, golden: Path) -> Path:
    """One scales its embeddings, the other does not."""
    return golden / str(request.param)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **OPTIONS) as llm:
        yield llm


def embeds_of(llm: LLM, prompt: dict[str, Any]) -> torch.Tensor:
    """The model's own embeddings of a prompt's tokens."""
    runner: Any = llm._runner()
    with torch.inference_mode():
        rows = runner.model.embed(torch.tensor(prompt["prompt_token_ids"]))
    return rows.clone()


def embedded(llm: LLM, prompt: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"prompt_embeds": embeds_of(llm, prompt), **more}


@pytest.mark.parametrize("params", [SHORT, DRAWN], ids=["greedy", "drawn"])
def test_answers_are_those_of_the_tokens(llm: LLM, params: SamplingParams) -> None:
    wanted = [tokens(one) for one in llm.generate(PROMPTS, params)]
    given = [embedded(llm, prompt) for prompt in PROMPTS]
    outputs = llm.generate(given, params)
    assert [tokens(one) for one in outputs] == wanted
    assert [one.outputs[0].text for one in outputs] == [
        one.outputs[0].text for one in llm.generate(PROMPTS, params)
    ]
    assert all(one.prompt is None and one.prompt_token_ids == [] for one in outputs)
    mixed = [x for pair in zip(PROMPTS, given, strict=True) for x in pair]
    assert [tokens(one) for one in llm.generate(mixed, params)] == [
        x for one in wanted for x in (one, one)
    ]


def test_answers_are_the_same_in_chunks_and_after_a_preemption(path: Path, llm: LLM) -> None:
    params = SHORT.clone(max_tokens=60)
    prompts = [ids(seed, 40) for seed in range(5)]
    wanted = [tokens(one) for one in llm.generate(prompts, params)]
    given = [embedded(llm, prompt) for prompt in prompts]
    small = {**OPTIONS, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    plan = llm.memory_plan
    page = plan.page_bytes + sum(group.frame_bytes for group in plan.windows)
    # not all five requests fit; layers with a window keep less of each
    with LLM(path, kv_cache_memory_bytes=(10 if plan.windows else 24) * page, **small) as other:
        assert [tokens(one) for one in other.generate(given, params)] == wanted
        assert other.get_metrics()["num_preemptions"] > 0
    with LLM(path, enforce_eager=True, **OPTIONS) as other:
        assert [tokens(one) for one in other.generate(given, params)] == wanted


def test_a_prompt_of_one_embedding_is_not_repeated_as_a_decode_step(llm: LLM) -> None:
    one = ids(7, 1)
    params = SHORT.clone(max_tokens=20)
    [wanted] = llm.generate(one, params)
    for _ in range(2):
        assert tokens(llm.generate(embedded(llm, one), params)[0]) == tokens(wanted)


def test_only_equal_embeddings_share_cached_pages(llm: LLM) -> None:
    llm.reset_prefix_cache()
    first, second = embedded(llm, ids(4, 64)), embedded(llm, ids(5, 64))
    [a] = llm.generate(first, SHORT)
    [b] = llm.generate(second, SHORT)
    [zeros] = llm.generate({"prompt_token_ids": [0] * 64}, SHORT)
    assert a.num_cached_tokens == b.num_cached_tokens == zeros.num_cached_tokens == 0
    assert tokens(a) != tokens(b)
    [again] = llm.generate(first, SHORT)
    assert again.num_cached_tokens == 48 and tokens(again) == tokens(a)
    [salted] = llm.generate({**first, "cache_salt": "s"}, SHORT)
    assert salted.num_cached_tokens == 0 and tokens(salted) == tokens(a)
    assert llm.pin(first) == 64
    assert llm.unpin(first)


def test_types_other_than_float32_are_converted(llm: LLM) -> None:
    rows = embeds_of(llm, ids(6, 9))
    for kind in (torch.bfloat16, torch.float16, torch.float64):
        given = rows.to(kind)
        [wanted] = llm.generate({"prompt_embeds": given.float()}, SHORT)
        assert tokens(llm.generate({"prompt_embeds": given}, SHORT)[0]) == tokens(wanted)
    [wanted] = llm.generate({"prompt_embeds": rows}, SHORT)
    array = rows.numpy()
    for given in (array, np.asfortranarray(array), array.astype(np.float64)):
        assert tokens(llm.generate({"prompt_embeds": given}, SHORT)[0]) == tokens(wanted)
    leaf = torch.nn.Parameter(rows.clone())
    assert tokens(llm.generate({"prompt_embeds": leaf}, SHORT)[0]) == tokens(wanted)


def test_the_caller_may_change_its_embeddings_after_the_call(llm: LLM) -> None:
    rows = embeds_of(llm, ids(6, 9))
    [wanted] = llm.generate({"prompt_embeds": rows}, SHORT)
    [name] = llm.enqueue({"prompt_embeds": rows}, SHORT)
    rows.zero_()
    [found] = llm.wait_for_completion()
    assert found.request_id == name and tokens(found) == tokens(wanted)


def test_streams_answers_penalties_and_pooling_take_embeddings(llm: LLM) -> None:
    given = embedded(llm, PROMPTS[1])
    pieces = [piece.outputs[0].token_ids for piece in llm.stream(given, SHORT)]
    assert list(itertools.chain.from_iterable(pieces)) == tokens(llm.generate(PROMPTS[1], SHORT)[0])
    params = DRAWN.clone(n=3)
    several = llm.generate(given, params)[0].outputs
    assert several == llm.generate(PROMPTS[1], params)[0].outputs
    fixed = SHORT.clone(presence_penalty=1.0, frequency_penalty=0.5, logprobs=3)
    assert llm.generate(given, fixed)[0].outputs == llm.generate(PROMPTS[1], fixed)[0].outputs
    # The prompt's tokens are not known, so only those of the answer are penalized.
    repeated = SHORT.clone(repetition_penalty=1.5, logit_bias={0: 5.0})
    assert llm.generate(given, repeated)[0].outputs[0].finish_reason == "length"
    for mode in ("mean", "token"):
        [one], [other] = llm.encode(given, pooling=mode), llm.encode(PROMPTS[1], pooling=mode)
        assert torch.equal(one.outputs.data, other.outputs.data)
    assert llm.embed(given)[0].embedding == llm.embed(PROMPTS[1])[0].embedding


def test_guidance_takes_embeddings_and_a_negative_prompt(llm: LLM) -> None:
    params = SHORT.clone(guidance_scale=1.5)
    negative = {"negative_prompt_token_ids": [5, 6]}
    [found] = llm.generate(embedded(llm, PROMPTS[0], **negative), params)
    [wanted] = llm.generate({**PROMPTS[0], **negative}, params)
    assert tokens(found) == tokens(wanted)
    with pytest.raises(RequestError, match="pass a negative_prompt"):
        llm.generate(embedded(llm, PROMPTS[0]), params)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: [[0.0] * n], "expected a torch tensor or a numpy array of floats, found"),
        (lambda n: None, "expected a torch tensor"),
        (lambda n: np.zeros((2, n), np.int64), "array of floats, found an array of int64"),
        (lambda n: torch.zeros(2, n, dtype=torch.int64), "found an array of int64"),
        (lambda n: np.zeros(n, np.float32), r"expected shape \[tokens, \d+\] .*, found \[\d+\]"),
        (lambda n: np.zeros((3, n + 1), np.float32), r"found \[3, \d+\]"),
        (lambda n: np.zeros((0, n), np.float32), r"at least one token, found \[0, \d+\]"),
        (lambda n: np.full((3, n), np.nan), r"prompt_embeds\[0\]: expected finite float32"),
        (lambda n: np.full((3, n), 1e300), r"prompt_embeds\[0\]: expected finite float32"),
        (lambda n: torch.zeros(128, n), "128 tokens, but the context holds 128"),
    ],
)
def test_bad_embeddings_are_rejected(llm: LLM, make: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate({"prompt_embeds": make(llm.model_config.hidden_size)}, SHORT)


def test_what_needs_tokens_is_rejected(llm: LLM) -> None:
    from sdk import BeamSearchParams

    given = embedded(llm, PROMPTS[1])
    for params in (SHORT.clone(prompt_logprobs=1), SHORT.clone(token_healing=True)):
        with pytest.raises(RequestError, match="prompt_embeds have no tokens"):
            llm.generate(given, params)
    with pytest.raises(RequestError, match="beam_search: expected prompts of tokens"):
        llm.beam_search(given, BeamSearchParams(2, 3))
    with pytest.raises(RequestError, match="snapshot: expected a prompt of tokens"):
        llm.snapshot(given)
    [name] = llm.enqueue(given, SHORT.clone(max_tokens=20))
    llm.step()
    with pytest.raises(RequestError, match="a snapshot needs tokens"):
        llm.snapshot(request_id=name)
    llm.abort(name)
    llm.wait_for_completion()
    with pytest.raises(RequestError, match="'prompt_embeds'; optionally 'cache_salt'"):
        llm.generate({**given, "prompt": "a"}, SHORT)
    with pytest.raises(RequestError, match="'prompt_embeds'; optionally 'cache_salt'"):
        llm.generate({**given, "suffix": "a"}, SHORT)


def test_truncation_keeps_the_last_embeddings(llm: LLM) -> None:
    rows = embeds_of(llm, PROMPTS[1])
    [short] = llm.generate({"prompt_embeds": rows[-20:]}, SHORT)
    [cut] = llm.generate({"prompt_embeds": rows}, SHORT.clone(truncate_prompt_tokens=20))
    assert tokens(cut) == tokens(short)


def test_an_engine_without_the_option_says_what_to_do(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="load it with enable_prompt_embeds=True"):
        tiny.generate({"prompt_embeds": np.zeros((2, 64), np.float32)}, SHORT)


def test_the_plan_counts_the_second_workspace(tiny_path: Path) -> None:
    given: dict[str, Any] = {"max_model_len": 128}
    plain = LLM.plan(tiny_path, **given)
    more = LLM.plan(tiny_path, enable_prompt_embeds=True, **given)
    eager = LLM.plan(tiny_path, enable_prompt_embeds=True, enforce_eager=True, **given)
    assert more.workspace > plain.workspace == eager.workspace


def test_embeddings_count_against_the_memory_for_results(llm: LLM) -> None:
    budget = llm._job_maker._results
    before, budget.nbytes = budget.nbytes, 4 * llm.model_config.hidden_size * 30
    try:
        with pytest.raises(RequestError, match=r"prompt_embeds: 70 tokens .* enough for 30 tok"):
            llm.generate(embedded(llm, PROMPTS[1]), SHORT)
        assert llm.generate(embedded(llm, PROMPTS[0]), SHORT)
    finally:
        budget.nbytes = before
