"""``guidance_scale``: transformers' tokens, and the same answer to the bit in any company."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, RequestError, SamplingParams
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec

OWN = [3 + i * 37 % 400 for i in range(40)]
NEGATIVE = [5 + i * 53 % 400 for i in range(21)]
PROMPT = {"prompt_token_ids": OWN, "negative_prompt_token_ids": NEGATIVE}
PLAIN = SamplingParams(seed=3, max_tokens=16, logprobs=2, ignore_eos=True)
GUIDED = PLAIN.clone(guidance_scale=1.5)


def facts(output: Any) -> tuple[Any, ...]:
    answer = output.outputs[0]
    rows = [sorted((i, p.logprob, p.rank) for i, p in row.items()) for row in answer.logprobs]
    return answer.token_ids, rows


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, max_model_len=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm: LLM) -> tuple[Any, ...]:
    llm.reset_prefix_cache()
    return facts(llm.generate(PROMPT, GUIDED)[0])


@pytest.mark.parametrize(("scale", "with_negative"), [(1.5, True), (0.0, True), (1.5, False)])
def test_greedy_tokens_equal_transformers(golden: Path, scale: float, with_negative: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = golden / "arch-llama3" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    more = {"negative_prompt_ids": torch.tensor([NEGATIVE])} if with_negative else {}
    expected = model.generate(
        torch.tensor([OWN]),
        max_new_tokens=16,
        do_sample=False,
        guidance_scale=scale,
        eos_token_id=None,
        pad_token_id=0,
        **more,
    )[0, len(OWN) :].tolist()
    options: dict[str, Any] = {"compute": "exact", "kv_cache_dtype": "float32"}
    with LLM(folder, max_model_len=128, skip_tokenizer_init=True, **options) as llm:
        prompt = PROMPT if with_negative else {"prompt_token_ids": OWN}
        params = GUIDED.clone(temperature=0, guidance_scale=scale)
        plain, guided = llm.generate(
            [OWN, prompt], [PLAIN.clone(temperature=0), params], use_tqdm=False
        )
    assert guided.outputs[0].token_ids == expected != plain.outputs[0].token_ids


def test_in_a_batch_with_others(llm: LLM, alone: tuple[Any, ...]) -> None:
    llm.reset_prefix_cache()
    others = [[3 + n, *OWN[n:]] for n in range(6)]
    params = [PLAIN, GUIDED, PLAIN, GUIDED, GUIDED, PLAIN, GUIDED]
    outputs = llm.generate([*others[:3], PROMPT, *others[3:]], params)
    assert facts(outputs[3]) == alone


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("budget", [2, 7])
def test_chunked_at_other_places_on_other_threads(
    tiny_path: Path, alone: tuple[Any, ...], budget: int, threads: int
) -> None:
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 2, "num_threads": threads}
    with LLM(tiny_path, max_model_len=128, **options) as small:
        assert facts(small.generate(PROMPT, GUIDED)[0]) == alone


def test_preempted(tiny_path: Path, llm: LLM, alone: tuple[Any, ...]) -> None:
    # The prompts take 6 and 5 pages of the 13, and each of the four sequences grows by one.
    memory = 14 * llm.memory_plan.page_bytes
    with LLM(tiny_path, max_model_len=128, kv_cache_memory_bytes=memory) as small:
        first = {"prompt_token_ids": [9, *OWN], "negative_prompt_token_ids": [8, *NEGATIVE]}
        outputs = small.generate([first, PROMPT], GUIDED.clone(max_tokens=60))
        assert outputs[1].metrics is not None and outputs[1].metrics.num_preemptions > 0
        tokens, rows = facts(outputs[1])
    assert (tokens[:16], rows[:16]) == alone


def test_each_of_n_answers_is_guided_and_logprobs_are_normalized(llm: LLM) -> None:
    [output] = llm.generate(PROMPT, GUIDED.clone(n=3, logprobs=-1, max_tokens=4))
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        for row in answer.logprobs or ():
            assert sum(math.exp(p.logprob) for p in row.values()) == pytest.approx(1, abs=1e-5)


def test_scale_1_is_plain_and_a_negative_prompt_may_be_text(llm: LLM) -> None:
    plain, same = llm.generate([OWN, OWN], [PLAIN, PLAIN.clone(guidance_scale=1)])
    assert facts(plain) == facts(same)
    text = {"prompt": "a cat", "negative_prompt": "a dog"}
    encode = llm.get_tokenizer().encode
    token_ids = {
        "prompt_token_ids": encode("a cat"),
        "negative_prompt_token_ids": encode("a dog"),
    }
    by_text, by_ids = llm.generate([text, token_ids], GUIDED)
    assert facts(by_text) == facts(by_ids)


def test_nan_in_the_guides_logits_ends_exactly_its_request(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as llm:
        [expected] = llm.generate([OWN], PLAIN)
        llm.reset_prefix_cache()
        runner = llm._runner()
        assert runner is not None
        graph = runner.strategy.graph
        replay = graph.replay

        def poisoned(*, outputs: int, **counts: int) -> None:
            replay(outputs=outputs, **counts)
            if outputs == 3:  # two requests and, last, a guide
                graph.result[1].numpy()[2, 5] = math.nan

        graph.replay = poisoned
        good, bad = llm.generate([OWN, PROMPT], [PLAIN, GUIDED])
        assert facts(good) == facts(expected)
        assert bad.outputs[0].finish_reason == "error"
        assert "not finite" in str(bad.outputs[0].stop_reason)


def test_stop_strings_and_aborts_release_both(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as llm:
        text = llm.generate(PROMPT, GUIDED)[0].outputs[0].text
        [output] = llm.generate(PROMPT, GUIDED.clone(stop=text[2:4]))
        assert output.outputs[0].finish_reason == "stop"
        for piece in llm.stream(PROMPT, GUIDED):
            assert not piece.finished
            break
        llm.generate(OWN, PLAIN)
        pool = llm._driver._engine.scheduler.pool
        assert pool.num_available == pool.capacity


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (PROMPT, PLAIN, "negative_prompt_token_ids has no effect without a guidance_scale"),
        ({"prompt": "a", "negative_prompt": 3}, GUIDED, "negative_prompt: expected a string"),
        ({**PROMPT, "negative_prompt": "a"}, GUIDED, "found the keys"),
        ({**PROMPT, "negative_prompt_token_ids": []}, GUIDED, "negative_prompt_token_ids: .*empty"),
        ({**PROMPT, "negative_prompt_token_ids": [448]}, GUIDED, "found 448"),
    ],
)
def test_a_bad_negative_prompt_is_refused(
    llm: LLM, prompt: Any, params: SamplingParams, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, params)


def test_the_engine_refuses_guidance_where_it_means_nothing(llm: LLM) -> None:
    engine = llm._driver._engine
    with pytest.raises(RequestError, match="guidance_scale: expected 1 for an embedding, found"):
        engine.add(Job(SequenceSpec("e", GUIDED, "embed"), tuple(OWN)))
    with pytest.raises(RequestError, match="no effect without"):
        spec = SequenceSpec("e", PLAIN)
        engine.add(Job(spec, tuple(OWN), negative_prompt_token_ids=tuple(NEGATIVE)))
    with pytest.raises(RequestError, match="negative_prompt_token_ids has no effect"):
        llm.embed(PROMPT)
