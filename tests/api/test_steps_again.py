"""Steps that are executed again because their requests stay: the tokens of any other step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestOutput, SamplingParams
from sdk.engine.rank.recorded import Recorded

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = GREEDY.clone(temperature=1.0, top_p=0.9, seed=3)
KINDS = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "xtc": DRAWN.clone(xtc_probability=0.5, xtc_threshold=0.01, seed=5),
    "mirostat": DRAWN.clone(mirostat_mode=2, seed=6),
    "logprobs": GREEDY.clone(logprobs=2),
    "prompt logprobs": GREEDY.clone(prompt_logprobs=1),
    "penalized": GREEDY.clone(repetition_penalty=1.3),
    "biased": GREEDY.clone(logit_bias={9: 3.0, 70: 100.0, 71: 99.9, 72: 99.8}),
    "some allowed": DRAWN.clone(allowed_token_ids=range(60, 90)),
    "bad words": GREEDY.clone(bad_words=["the", "a"]),
    "banned strings": GREEDY.clone(banned_strings=["e", "th", "a", "o", "S"]),
    "no n-gram twice": GREEDY.clone(no_repeat_ngram_size=2),
    "guided": GREEDY.clone(guidance_scale=1.5),
}


def prompt(seed: int, length: int = 9) -> dict[str, Any]:
    return {"prompt_token_ids": [3 + (seed * 37 + i * 11) % 400 for i in range(length)]}


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def eager(tiny_path: Path) -> Iterator[LLM]:
    """Runs operator by operator, and no step again."""
    with LLM(tiny_path, max_model_len=128, enforce_eager=True) as llm:
        yield llm


@pytest.fixture
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, max_model_len=128) as llm:
        yield llm


def count_again(llm: LLM) -> list[int]:
    """Grows by the number of rows whenever a step is executed again."""
    runner, rows = llm._runner(), []
    assert runner is not None and isinstance(runner.strategy, Recorded)
    graph = runner.strategy.graph
    replay = graph.replay_again

    def replay_again() -> None:
        rows.append(len(runner._repeated.plan.rows))
        replay()

    graph.replay_again = replay_again
    return rows


def expected(eager: LLM, seeds: list[int], params: list[SamplingParams]) -> list[list[int]]:
    """The tokens of each request when it runs alone."""
    return [
        tokens(eager.generate(prompt(seed), one)[0])
        for seed, one in zip(seeds, params, strict=True)
    ]


def test_requests_that_end_at_different_times_and_fill_pages(llm: LLM, eager: LLM) -> None:
    again = count_again(llm)
    params = [GREEDY.clone(max_tokens=count) for count in (3, 20, 40, 80)]
    params += [DRAWN.clone(max_tokens=count, seed=count) for count in (30, 70)]
    outputs = llm.generate([prompt(seed, 4 + 5 * seed) for seed in range(6)], params)
    alone = [
        tokens(eager.generate(prompt(seed, 4 + 5 * seed), one)[0])
        for seed, one in enumerate(params)
    ]
    assert [tokens(output) for output in outputs] == alone
    assert set(again) == {6, 5, 4, 3, 2, 1} and len(again) > 60


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("kind", KINDS)
def test_beside_a_request_of_every_kind(llm: LLM, eager: LLM, kind: str) -> None:
    again = count_again(llm)
    params = [GREEDY, KINDS[kind].clone(max_tokens=20), DRAWN]
    outputs = llm.generate([prompt(seed) for seed in range(3)], params)
    assert [tokens(output) for output in outputs] == expected(eager, [0, 1, 2], params)
    plain = kind not in ("mirostat", "logprobs", "guided")
    assert (3 in again) == plain, "all three again, or the tokens alone are not all"
    assert 2 in again


def test_requests_that_join_and_leave_between_steps(llm: LLM, eager: LLM) -> None:
    again = count_again(llm)
    names = llm.enqueue([prompt(0), prompt(1)], [GREEDY, DRAWN])
    for _ in range(12):
        llm.step()
    names += llm.enqueue([prompt(2)], [DRAWN.clone(seed=8)])
    for _ in range(10):
        llm.step()
    llm.abort(names[0])
    done = {output.request_id: output for output in llm.wait_for_completion()}
    alone = expected(eager, [0, 1, 2], [GREEDY, DRAWN, DRAWN.clone(seed=8)])
    assert [tokens(done[name]) for name in names[1:]] == alone[1:]
    left = tokens(done[names[0]])
    assert left == alone[0][: len(left)] and 20 <= len(left) < 40
    assert set(again) == {1, 2, 3}


def test_more_steps_than_are_kept_for_the_requests(tiny_path: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (150, 230)]
    params.append(DRAWN.clone(max_tokens=200))
    answers = []
    for enforce_eager in (False, True):
        with LLM(tiny_path, max_model_len=256, enforce_eager=enforce_eager) as llm:
            outputs = llm.generate([prompt(seed) for seed in range(3)], params)
            answers.append([tokens(output) for output in outputs])
    assert answers[0] == answers[1]


def test_preempted_and_waiting_for_a_seat(tiny_path: Path, eager: LLM) -> None:
    memory = 12 * eager.memory_plan.page_bytes
    with LLM(tiny_path, max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes=memory) as small:
        again = count_again(small)
        params = [GREEDY, DRAWN, GREEDY, DRAWN.clone(seed=5), GREEDY, DRAWN.clone(seed=6)]
        params = [one.clone(max_tokens=60) for one in params]
        outputs = small.generate([prompt(seed) for seed in range(6)], params)
        assert [tokens(output) for output in outputs] == expected(eager, list(range(6)), params)
        assert small.get_metrics()["num_preemptions"] > 0 and 4 in again


def test_a_stream_gets_every_token_when_it_comes(llm: LLM, eager: LLM) -> None:
    again = count_again(llm)
    pieces = [output.outputs[0].token_ids for output in llm.stream(prompt(4), GREEDY)]
    assert [token for piece in pieces for token in piece] == expected(eager, [4], [GREEDY])[0]
    assert len(pieces) == 40 and again == [1] * 38


def test_a_stop_token_and_a_stop_string_end_their_requests(llm: LLM, eager: LLM) -> None:
    answers = expected(eager, [1, 2], [GREEDY, GREEDY])
    text = eager.get_tokenizer().decode(answers[1][20:23])
    params = [GREEDY.clone(stop_token_ids=[answers[0][15]]), GREEDY.clone(stop=[text])]
    again = count_again(llm)
    outputs = llm.generate([prompt(1), prompt(2)], params)
    plain = eager.generate([prompt(1), prompt(2)], params)
    for found, wanted in zip(outputs, plain, strict=True):
        assert found.outputs[0] == wanted.outputs[0] and found.outputs[0].finish_reason == "stop"
    assert again


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_answer_may_end_after_min_tokens_wherever_the_batch_changes(
    llm: LLM, count: int
) -> None:
    """The other request leaves just before: the first step that may be repeated forbids EOS."""
    other = GREEDY.clone(max_tokens=count)
    ends = DRAWN.clone(min_tokens=3, ignore_eos=False, logit_bias={2: 100.0})
    outputs = llm.generate([prompt(1), prompt(2)], [other, ends])
    assert [len(tokens(output)) for output in outputs] == [count, 4]


def test_nothing_of_a_finished_request_is_kept(llm: LLM) -> None:
    llm.generate([prompt(0), prompt(1)], [GREEDY, GREEDY.clone(max_tokens=20)])
    scheduler, runner = llm._driver._engine.scheduler, llm._runner()
    assert runner is not None
    in_flight = scheduler._in_flight
    assert not in_flight and in_flight.repeatable is None and in_flight.need_page == []
    llm.generate(prompt(2), GREEDY.clone(max_tokens=1))  # a rank hears of it with the next step
    assert runner._repeated is None and not runner._last_step.launched
