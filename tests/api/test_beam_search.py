"""Beam search finds the beams of transformers, and says what is wrong with its parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sdk import LLM, BeamSearchParams, RequestError
from sdk.api.beam_search import Beams
from sdk.api.logprobs import Logprob
from tests.api.engines import ids

PROMPTS = [ids(1, 5), ids(2, 20), ids(3, 33)]
EXACT: dict[str, Any] = {"compute": "exact", "max_model_len": 128}


@pytest.fixture(scope="module")
def folder(golden: Path) -> Path:
    return golden / "arch-llama3" / "hf"


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def exact(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **EXACT) as llm:
        yield llm


def frequent_ends(model: Any, prompt: list[int]) -> list[int]:
    """Tokens that beams after this prompt often use: as EOS they end beams at many lengths."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]), num_beams=4, max_new_tokens=6, do_sample=False,
            eos_token_id=None, num_return_sequences=4,
        )  # fmt: skip
    tokens = found[:, len(prompt) :].flatten().tolist()
    return sorted(set(tokens), key=tokens.count)[-2:]


CASES = [
    {"length_penalty": 1.0, "early_stopping": False},
    {"length_penalty": 1.0, "early_stopping": True},
    {"length_penalty": 0.0, "early_stopping": "never"},
    {"length_penalty": 2.0, "early_stopping": "never"},
    {"length_penalty": -1.0, "early_stopping": False},
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_those_of_transformers(
    exact: LLM, theirs: Any, case: dict[str, Any], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = set()
    for prompt in PROMPTS:
        tokens = prompt["prompt_token_ids"]
        ends = frequent_ends(theirs, tokens)
        monkeypatch.setattr(exact._beam_searches, "_eos_token_ids", frozenset(ends))
        [output] = exact.beam_search(prompt, BeamSearchParams(width, 10, **case))
        with torch.inference_mode():
            found = theirs.generate(
                torch.tensor([tokens]), num_beams=width, num_return_sequences=width,
                max_new_tokens=10, do_sample=False, eos_token_id=ends, pad_token_id=447,
                return_dict_in_generate=True, output_scores=True, **case,
            )  # fmt: skip
        for index, (one, row) in enumerate(zip(output.sequences, found.sequences, strict=True)):
            wanted = row.tolist()
            while wanted[-1] == 447:
                wanted.pop()
            assert one.tokens == wanted
            assert one.finish_reason == ("stop" if wanted[-1] in ends else "length")
            assert one.score == pytest.approx(float(found.sequences_scores[index]), abs=1e-3)
            lengths.add(len(one.tokens) - len(tokens))
    assert case["length_penalty"] > 1 or len(lengths) > 1  # a large penalty favors long beams


def test_several_prompts_give_what_each_gives_alone(exact: LLM) -> None:
    params = BeamSearchParams(3, 24)
    together = exact.beam_search(PROMPTS, params)
    alone = [exact.beam_search(prompt, params)[0] for prompt in PROMPTS]
    assert together == alone
    for output, prompt in zip(together, PROMPTS, strict=True):
        assert len(output.sequences) == 3
        scores = [one.score for one in output.sequences]
        assert scores == sorted(scores, reverse=True)
        for one in output.sequences:
            answer = one.tokens[len(prompt["prompt_token_ids"]) :]
            assert one.tokens[: -len(answer)] == prompt["prompt_token_ids"]
            chosen = [row[token].logprob for row, token in zip(one.logprobs, answer, strict=True)]
            assert one.cum_logprob == pytest.approx(sum(chosen))
            assert one.score == pytest.approx(one.cum_logprob / len(answer))
            assert one.text == exact.get_tokenizer().decode(one.tokens)


def test_without_a_prefix_cache_the_beams_are_the_same(exact: LLM, folder: Path) -> None:
    params = BeamSearchParams(2, 20)
    with LLM(folder, enable_prefix_caching=False, **EXACT) as llm:
        assert llm.beam_search(PROMPTS[1], params) == exact.beam_search(PROMPTS[1], params)


def test_a_step_computes_one_token_of_each_beam(exact: LLM) -> None:
    exact.reset_prefix_cache()
    before = exact.get_metrics()["num_prompt_tokens"]
    exact.beam_search(ids(9, 64), BeamSearchParams(2, 16, ignore_eos=True))
    ran = exact.get_metrics()["num_prompt_tokens"] - before
    assert ran <= 64 + 2 * 16


def test_eos_ends_no_beam_if_it_is_ignored(exact: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact._beam_searches, "_eos_token_ids", frozenset(range(448)))
    [stopped] = exact.beam_search(PROMPTS[0], BeamSearchParams(2, 8))
    [ignored] = exact.beam_search(PROMPTS[0], BeamSearchParams(2, 8, ignore_eos=True))
    assert all(len(one.tokens) == 6 for one in stopped.sequences)
    assert all(one.finish_reason == "length" for one in ignored.sequences)
    assert all(len(one.tokens) == 13 for one in ignored.sequences)


def test_the_context_limits_beams(exact: LLM) -> None:
    [output] = exact.beam_search(ids(4, 120), BeamSearchParams(2, 1000, ignore_eos=True))
    assert {len(one.tokens) for one in output.sequences} == {128}
    with pytest.raises(RequestError, match="context holds 128"):
        exact.beam_search(ids(4, 128), BeamSearchParams(2, 5))


def test_beams_of_text_without_a_tokenizer_have_no_text(folder: Path) -> None:
    with LLM(folder, skip_tokenizer_init=True, **EXACT) as llm:
        [output] = llm.beam_search(PROMPTS[0], BeamSearchParams(2, 3))
    assert [one.text for one in output.sequences] == [None, None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 0}, r"beam_width: expected an integer in \[1, 64\], found 0"),
        ({"beam_width": 65}, "beam_width: expected an integer"),
        ({"beam_width": True}, "beam_width: expected an integer"),
        ({"max_tokens": 1.5}, "max_tokens: expected an integer"),
        ({"temperature": 0.7}, "temperature: expected 0 or 1"),
        ({"length_penalty": float("nan")}, "length_penalty: expected a number"),
        ({"length_penalty": "1"}, "length_penalty: expected a number"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False"),
        ({"early_stopping": "always"}, "early_stopping: expected True, False or"),
    ],
)
def test_bad_parameters_are_rejected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **given})


def test_other_parameters_are_rejected(tiny: LLM) -> None:
    with pytest.raises(RequestError, match="params: expected BeamSearchParams, found"):
        tiny.beam_search("a", {"beam_width": 2})  # type: ignore[arg-type]
    assert tiny.beam_search([], BeamSearchParams(2, 2)) == []


def test_an_interrupted_search_leaves_no_request(tiny: LLM, monkeypatch: Any) -> None:
    steps = itertools.count()

    def interrupted(self: Beams, candidates: Any) -> None:
        if next(steps) == 2:
            raise KeyboardInterrupt
        advance(self, candidates)

    advance = Beams.advance
    monkeypatch.setattr(Beams, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tiny.beam_search("abc", BeamSearchParams(2, 9))
    assert not tiny.has_unfinished_requests


def test_the_widest_search_asks_for_enough_candidates(tiny: LLM) -> None:
    beams = Beams(BeamSearchParams(64, 4), range(20), 9)
    assert beams.num_candidates == 21 * 64
    rows = [{token: Logprob(-1.0 - token) for token in range(448)}]
    beams.advance(rows)
    assert len(beams.running) == 64 and len(beams.finished) == 20
    [output] = tiny.beam_search(ids(1), BeamSearchParams(64, 2))
    assert len({tuple(one.tokens) for one in output.sequences}) == 64
