"""Every answer of a structured request has its structure, however it runs and wherever it ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, SamplingParams
from sdk.api.errors import RequestError
from sdk.api.outputs import RequestOutput
from tests.structured_answers import PERSON, STRUCTURES

PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8], [7, 7, 7, 9, 11, 90, 91, 92, 93, 94, 95, 96, 97, 98]]
DRAWN = SamplingParams(temperature=0.9, seed=3, max_tokens=120)
STRUCTURED = DRAWN.clone(structured_outputs={"json": PERSON})
VALID = STRUCTURES["object"][1]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "hot": {"temperature": 5.0},
    "logprobs": {"logprobs": 2},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "callbacks": {"logits_processors": [lambda _, row: row * 0.5]},
    "guidance": {"guidance_scale": 1.5},
    "mirostat": {"mirostat_mode": 2},
    "dry": {"dry_multiplier": 0.8},
    "minimum": {"min_tokens": 110},
    "no end": {"ignore_eos": True},
    "final only": {"output_kind": None},
    "bias": {"logit_bias": {9: 90.0}},
}


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [one.text for output in outputs for one in output.outputs]


@pytest.mark.parametrize("name", STRUCTURES)
def test_each_structure(tiny: LLM, name: str) -> None:
    structure, is_valid = STRUCTURES[name]
    params = [
        DRAWN.clone(structured_outputs=structure, seed=seed, max_tokens=most)
        for seed, most in enumerate((20, 21, 30, 47, 60, 90, 200) if "(" not in name else (90,))
    ]
    accepted = 0
    for param in params:
        try:
            [output] = tiny.generate([PROMPTS[0]], param)
        except RequestError as error:
            assert "the shortest answer has" in str(error)
            continue
        [answer] = output.outputs
        assert is_valid(answer.text), answer.text
        assert answer.finish_reason == "stop"
        assert len(answer.token_ids) <= (param.max_tokens or 0)
        accepted += 1
    assert accepted >= 2


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", KINDS)
def test_with_other_parameters(tiny: LLM, name: str) -> None:
    changes = {key: value for key, value in KINDS[name].items() if value is not None}
    params = STRUCTURED.clone(**changes)
    outputs = tiny.generate(PROMPTS, params)
    assert all(VALID(text) for text in texts(outputs)), texts(outputs)
    alone = [tiny.generate([prompt], params)[0] for prompt in PROMPTS]
    assert texts(alone) == texts(outputs)
    if name == "logprobs":
        [answer] = outputs[0].outputs
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        for token, found in zip(answer.token_ids, answer.logprobs, strict=True):
            assert token in found


def test_several_answers(tiny: LLM) -> None:
    [output] = tiny.generate([PROMPTS[0]], STRUCTURED.clone(n=4))
    assert len(set(texts([output]))) == 4
    assert all(map(VALID, texts([output])))
    [best] = tiny.generate([PROMPTS[0]], STRUCTURED.clone(n=1, best_of=3))
    assert VALID(best.outputs[0].text)


def test_a_stream_adds_up(tiny: LLM) -> None:
    [whole] = tiny.generate([PROMPTS[0]], STRUCTURED)
    pieces = list(tiny.stream({"prompt_token_ids": PROMPTS[0]}, STRUCTURED))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert pieces[-1].outputs[0].finish_reason == "stop"


OPTIONS: dict[str, dict[str, Any]] = {
    "operator by operator": {"enforce_eager": True},
    "chunked": {"max_num_batched_tokens": 4, "max_num_seqs": 3},
    "few pages": {"kv_cache_memory_bytes": "288KiB", "max_num_seqs": 8},
    "8-bit KV": {"kv_cache_dtype": "int8"},
    "4-bit KV": {"kv_cache_dtype": "k8v4"},
    "exact": {"compute": "exact"},
    "two ranks": {"tensor_parallel_size": 2, "compute": "exact"},
    "one thread": {"num_threads": 1},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_however_it_runs(tiny_path: Path, name: str) -> None:
    with LLM(tiny_path, max_model_len=256, **OPTIONS[name]) as llm:
        plain = DRAWN.clone(max_tokens=60)
        params = [
            STRUCTURED.clone(seed=seed) if seed % 3 else plain.clone(seed=seed) for seed in range(9)
        ]
        prompts = [PROMPTS[seed % 3] for seed in range(9)]
        outputs = llm.generate(prompts, params)
        for seed, output in enumerate(outputs):
            assert seed % 3 == 0 or VALID(output.outputs[0].text)
        preempted = llm.get_metrics()["num_preemptions"]
        assert bool(preempted) == (name == "few pages")
        again = [llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
        assert texts(again) == texts(outputs)


def test_a_text_that_cannot_be_longer_ends_at_once(tiny: LLM) -> None:
    params = SamplingParams(temperature=0, structured_outputs={"regex": "[a-c]{3}"})
    [output] = tiny.generate([PROMPTS[0]], params)
    assert len(output.outputs[0].text) == 3
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None


def _random_answers(llm: LLM, count: int, seed: int) -> int:
    """Runs requests with random limits; returns how many were accepted and have a structure."""
    draw = random.Random(seed)
    checks: dict[str, Callable[[str], bool]] = {}
    while len(checks) < count:
        for _ in range(min(64, count - len(checks))):
            structure, is_valid = draw.choice(list(STRUCTURES.values()))
            params = SamplingParams(
                temperature=draw.choice([0, 0.7, 1.0, 3.0]),
                seed=draw.randrange(10**6),
                max_tokens=draw.choice([draw.randint(12, 40), draw.randint(20, 200)]),
                structured_outputs=structure,
            )
            prompt = [draw.randrange(3, 400) for _ in range(draw.randint(1, 20))]
            name = f"{seed}-{len(checks)}"
            llm.enqueue({"prompt_token_ids": prompt}, params, request_id=name)
            checks[name] = is_valid
    accepted = refused = 0
    while accepted + refused < count:
        try:
            outputs = llm.wait_for_completion()
        except RequestError as error:
            assert "the shortest answer has" in str(error)
            refused += 1
            continue
        for output in outputs:
            [answer] = output.outputs
            assert answer.finish_reason == "stop", answer
            assert checks[output.request_id](answer.text), answer
            accepted += 1
    return accepted


@pytest.mark.slow
def test_answers_with_random_limits(tiny: LLM) -> None:
    assert _random_answers(tiny, 300, seed=1) > 200


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_answers_with_random_limits(tiny: LLM) -> None:
    seed = accepted = 0
    while accepted < 10_000:
        seed += 1
        found = _random_answers(tiny, 1000, seed)
        assert found > 700
        accepted += found


def test_a_callback_sees_no_masked_token_chosen(tiny: LLM) -> None:
    """Callbacks run before the mask, so what they prefer is drawn only if it is allowed."""

    def prefer(output: tuple[int, ...], row: torch.Tensor) -> torch.Tensor:
        row[len(output) % 400] = 1e4
        return row

    [output] = tiny.generate([PROMPTS[0]], STRUCTURED.clone(logits_processors=[prefer]))
    assert VALID(output.outputs[0].text)


@pytest.mark.parametrize("how", ["recorded", "operators"])
def test_the_time_that_steps_wait_for_masks_is_told(tiny_path: Path, how: str) -> None:
    """Every step computes its masks while the model runs, or after it: neither takes no time."""
    with LLM(tiny_path, max_model_len=512, enforce_eager=how == "operators") as llm:
        [plain] = llm.generate([PROMPTS[0]], DRAWN, use_tqdm=False)
        [structured] = llm.generate([PROMPTS[0]], STRUCTURED, use_tqdm=False)
        [after] = llm.generate([PROMPTS[0]], DRAWN, use_tqdm=False)
    assert plain.metrics is not None and after.metrics is not None
    assert plain.metrics.mask_seconds == after.metrics.mask_seconds == 0
    metrics = structured.metrics
    assert metrics is not None and metrics.finished_ts is not None
    assert 0 < metrics.mask_seconds < metrics.finished_ts - metrics.arrival_time
    assert "ms waiting for masks" in str(structured.timeline)
