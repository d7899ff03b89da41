"""A preempted request answers as an undisturbed one does, whatever its parameters remember."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestOutput, SamplingParams

PROMPTS = [[3 + (7 + j) * i % 400 for i in range(20)] for j in range(4)]
PARAMS = SamplingParams(temperature=0.9, seed=11, max_tokens=40, ignore_eos=True)


def banned(generated: Any, logits: Any) -> Any:
    """What may come depends on what was generated so far."""
    logits[list(generated[-3:])] = float("-inf")
    return logits


#: Every parameter whose effect depends on the tokens so far, and the draws themselves.
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "mirostat": {"mirostat_mode": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    "mirostat with penalties and log-probabilities": {
        "mirostat_mode": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.5,
        "presence_penalty": 0.7,
        "logprobs": 2,
    },
    "penalties": {
        "temperature": 0.3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "dry": {"temperature": 0.2, "dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_base": 1.5},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "no_repeat_ngram_size": {"temperature": 0.0, "no_repeat_ngram_size": 2},
    "bad_words": {"temperature": 0.1, "bad_words": ["a", "the", "er", "in"]},
    "banned_strings": {"temperature": 0.1, "banned_strings": ["a", "the", "er", "in", "0"]},
    "min_tokens": {"min_tokens": 30, "ignore_eos": False, "stop_token_ids": list(range(3, 200))},
    "logit_bias": {"logit_bias": {5: 4.0, 9: 4.0, 17: -100.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(100, 160))},
    "a logits processor": {"temperature": 0.1, "logits_processors": [banned]},
    "guidance": {"guidance_scale": 1.5, "temperature": 0.5},
    "guidance under mirostat": {"guidance_scale": 1.5, "mirostat_mode": 2},
    "several answers": {"n": 2, "mirostat_mode": 2, "repetition_penalty": 1.1},
    "best_of": {"n": 1, "best_of": 2, "presence_penalty": 0.3},
}


@pytest.fixture(scope="module")
def small(tiny_path: Path) -> Iterator[LLM]:
    """Pages for two of the answers: the others are preempted again and again."""
    page = LLM.plan(tiny_path, max_model_len=128).page_bytes
    options = {"kv_cache_memory_bytes": 8 * page, "max_num_batched_tokens": 17, "max_num_seqs": 4}
    with LLM(tiny_path, max_model_len=128, **options) as llm:
        yield llm


def answers(output: RequestOutput) -> list[tuple[object, ...]]:
    return [
        (one.token_ids, one.text, one.logprobs, one.finish_reason, one.stop_reason)
        for one in output.outputs
    ]


def preempted(outputs: list[RequestOutput]) -> bool:
    """Whether somebody was who had generated something."""
    return any(
        event.kind == "preempted" and event.num_tokens > len(output.prompt_token_ids) + 1
        for output in outputs
        for event in (output.metrics.events if output.metrics else ())
    )


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_a_preempted_request_gets_the_tokens_of_an_undisturbed_one(
    tiny: LLM, small: LLM, variant: dict[str, Any]
) -> None:
    params = PARAMS.clone(**variant)
    expected = [answers(tiny.generate([prompt], params)[0]) for prompt in PROMPTS]
    outputs = small.generate(PROMPTS, params)
    assert preempted(outputs)
    assert [answers(output) for output in outputs] == expected


def test_a_stop_string_that_a_preemption_interrupts_is_found(tiny: LLM, small: LLM) -> None:
    undisturbed = tiny.generate(PROMPTS, PARAMS)
    # a piece that several tokens make, so late that everybody was preempted before
    stops = [output.outputs[0].text[-12:-6] for output in undisturbed]
    params = [PARAMS.clone(stop=[stop]) for stop in stops]
    expected = [answers(tiny.generate([p], q)[0]) for p, q in zip(PROMPTS, params, strict=True)]
    outputs = small.generate(PROMPTS, params)
    assert preempted(outputs)
    assert [answers(output) for output in outputs] == expected
    assert [output.outputs[0].stop_reason for output in outputs] == stops


def test_the_pieces_of_preempted_streams_are_those_of_undisturbed_ones(
    tiny: LLM, small: LLM
) -> None:
    params = PARAMS.clone(mirostat_mode=2, logprobs=1)

    def together(llm: LLM) -> list[tuple[str, list[int], int]]:
        with llm._driver._step_lock:  # so that none ends before the last one comes
            streams = [llm.stream(prompt, params) for prompt in PROMPTS]
        answers = []
        for stream in streams:
            pieces = [piece.outputs[0] for piece in stream]
            ids = [token for piece in pieces for token in piece.token_ids]
            rows = sum(len(piece.logprobs or ()) for piece in pieces)
            answers.append(("".join(piece.text for piece in pieces), ids, rows))
        return answers

    before = small.get_metrics()["num_preemptions"]
    assert together(small) == together(tiny)
    assert small.get_metrics()["num_preemptions"] > before
