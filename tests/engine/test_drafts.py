"""Answers with drafts are bitwise those without, whatever the drafter says.

The drafter is scripted: it knows the answers and is right, wrong or right up to some token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_card import on_a_card

from sdk import LLM, SamplingParams
from sdk.engine.scheduling.drafts import Drafter, Drafts
from sdk.engine.scheduling.request import Request
from sdk.loading import load as loading

MOST = 4
PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8], [7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = GREEDY.clone(temperature=0.9, top_p=0.9, seed=3)
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "xtc": DRAWN.clone(xtc_probability=0.5, xtc_threshold=0.01, seed=5),
    "logprobs": DRAWN.clone(logprobs=2),
    "prompt logprobs": GREEDY.clone(prompt_logprobs=1),
    "penalized": DRAWN.clone(repetition_penalty=1.3, frequency_penalty=0.3),
    "biased": DRAWN.clone(logit_bias={9: 3.0, 70: 4.0}),
    "some allowed": DRAWN.clone(allowed_token_ids=range(60, 90)),
    "no n-gram twice": GREEDY.clone(no_repeat_ngram_size=2),
    "dry": GREEDY.clone(dry_multiplier=0.8, dry_allowed_length=1, dry_sequence_breakers=[]),
    "at least some": DRAWN.clone(stop_token_ids=range(0, 440, 2), min_tokens=7),
    "mirostat": DRAWN.clone(mirostat_mode=2, seed=6),
    "callbacks": DRAWN.clone(logits_processors=[lambda _, row: row * 1.01]),
    "guided": GREEDY.clone(guidance_scale=1.5),
    "structured": DRAWN.clone(structured_outputs={"json": list[int]}, ignore_eos=False),
    "complete": GREEDY.clone(structured_outputs={"regex": "[a-z]{2,9}(-[0-9]{3}){2}"}),
}
#: How many of the proposed tokens are right, by the number of tokens known.
SCRIPTS: dict[str, Callable[[int], int]] = {
    "right": lambda known: MOST,
    "wrong": lambda known: 0,
    "partly right": lambda known: known % (MOST + 1),
}


class Scripted(Drafter):
    """Knows how prompts are answered."""

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], right: str) -> None:
        self._answers = answers
        self._right = SCRIPTS[right]

    def propose(self, request: Request, most: int) -> Sequence[int]:
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        done = request.num_output_tokens
        coming = list(self._answers[prompt][done : done + most])
        right = self._right(request.num_tokens)
        return coming[:right] + [(token + 1) % 400 for token in coming[right:]]


@pytest.fixture
def path(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.fixture
def room_for_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that verify up to ``MOST`` drafts of each request."""
    config = loading._runner_config

    def with_drafts(*args: Any) -> Any:
        return dataclasses.replace(config(*args), max_draft_tokens=6 * MOST)

    monkeypatch.setattr(loading, "_runner_config", with_drafts)


@contextmanager
def opened(path: Path, how: str, **options: Any) -> Iterator[LLM]:
    options = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 6} | options
    if how == "on a card":
        with on_a_card(path, **options) as (llm, _):
            yield llm
    else:
        with LLM(path, enforce_eager=how == "eager", **options) as llm:
            yield llm


def seen(llm: LLM, params: list[SamplingParams], prompts: Any = PROMPTS) -> list[Any]:
    """Everything an answer has, log-probabilities too."""
    outputs = llm.generate(prompts, params)
    llm._driver._engine.scheduler.check()
    return [
        (output.outputs[0], [dict(x) if x else None for x in output.prompt_logprobs or ()])
        for output in outputs
    ]


def draft(llm: LLM, found: list[Any], right: str, prompts: Any = PROMPTS) -> Any:
    """Have answers drafted by one who knows them; the scheduler."""
    answers = {
        tuple(prompt): answer.token_ids for prompt, (answer, _) in zip(prompts, found, strict=True)
    }
    scheduler = llm._driver._engine.scheduler
    scheduler.drafts = Drafts(Scripted(answers, right), MOST)
    return scheduler


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("how", ["recorded", "eager", "on a card"])
@pytest.mark.parametrize("right", SCRIPTS)
def test_answers_with_drafts_are_those_without(
    path: Path, how: str, right: str, room_for_drafts: None
) -> None:
    for names in (list(KINDS)[begin : begin + 4] for begin in range(0, len(KINDS), 4)):
        params = [KINDS[name] for name in names]
        prompts = PROMPTS[: len(params)]
        with opened(path, how) as llm:
            plain = seen(llm, params, prompts)
            llm.reset_prefix_cache()
            steps = llm.get_metrics()["num_steps"]
            scheduler = draft(llm, plain, right, prompts)
            assert seen(llm, params, prompts) == plain, names
            taken = [name for name in names if name not in ("mirostat", "callbacks", "guided")]
            assert (scheduler.committer.num_draft_tokens > 0) == bool(taken)
            accepted = scheduler.committer.num_accepted_tokens
            assert accepted <= scheduler.committer.num_draft_tokens
            if taken and right != "partly right":
                assert accepted == (scheduler.committer.num_draft_tokens if right == "right" else 0)
            if right == "right" and taken == names:
                assert llm.get_metrics()["num_steps"] - steps < 0.5 * steps


def test_a_stop_string_within_accepted_drafts_ends_the_answer_there(
    path: Path, room_for_drafts: None
) -> None:
    with opened(path, "recorded") as llm:
        free = seen(llm, [GREEDY] * 4)
        texts = [
            llm.get_tokenizer().decode(list(answer.token_ids[6:8])).strip() for answer, _ in free
        ]
        params = [
            GREEDY.clone(stop=[text] if text else ["never said"], logprobs=0) for text in texts
        ]
        plain = seen(llm, params)
        assert sum(answer.finish_reason == "stop" for answer, _ in plain) >= 2
        before = llm.get_metrics()["num_generation_tokens"]
        llm.reset_prefix_cache()
        draft(llm, free, "right")
        assert seen(llm, params) == plain
        told = sum(len(answer.token_ids) for answer, _ in plain)
        assert llm.get_metrics()["num_generation_tokens"] - before == told


def test_a_stream_gets_the_same_text_in_larger_pieces(path: Path, room_for_drafts: None) -> None:
    with opened(path, "recorded") as llm:
        free = seen(llm, [DRAWN] * 4)
        draft(llm, free, "right")
        pieces = [output.outputs[0] for output in llm.stream(PROMPTS[0], DRAWN)]
        assert "".join(piece.text for piece in pieces) == free[0][0].text
        tokens = [token for piece in pieces for token in piece.token_ids]
        assert tokens == list(free[0][0].token_ids) and len(pieces) < 10


def test_several_answers_and_preemptions(path: Path, room_for_drafts: None) -> None:
    """Few pages: drafts do without, and what is preempted comes back to the same answer."""
    params = [DRAWN.clone(max_tokens=60, seed=seed) for seed in range(4)]
    with opened(path, "recorded") as llm:
        plain = seen(llm, params)
        memory = 9 * llm.memory_plan.page_bytes
    with opened(path, "recorded", kv_cache_memory_bytes=memory) as llm:
        scheduler = draft(llm, plain, "partly right")
        assert seen(llm, params) == plain
        assert llm.get_metrics()["num_preemptions"] > 0
        assert scheduler.committer.num_accepted_tokens > 0


def test_pages_of_accepted_drafts_are_found_again(path: Path, room_for_drafts: None) -> None:
    """What a later prompt finds in the cache was computed from tokens that were accepted."""
    params = GREEDY.clone(max_tokens=50)
    with opened(path, "recorded") as llm:
        plain = seen(llm, [params] * 4)
        whole = [[*prompt, *x.token_ids] for prompt, (x, _) in zip(PROMPTS, plain, strict=True)]
        after = seen(llm, [GREEDY] * 4, whole)
        llm.reset_prefix_cache()
        scheduler = draft(llm, plain, "partly right")
        assert seen(llm, [params] * 4) == plain
        scheduler.drafts = None
        outputs = llm.generate(whole, GREEDY)
        assert all(output.num_cached_tokens >= 48 for output in outputs)
        assert [x.outputs[0].token_ids for x in outputs] == [x.token_ids for x, _ in after]
