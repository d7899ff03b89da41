"""``pump``: steps whose size fits the time of a frame, on a clock that the test controls."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import sdk.requests.driving.driver
import sdk.requests.driving.step_sizes
from sdk import LLM, RequestError, SamplingParams
from sdk.requests.driving.step_sizes import StepSizes
from tests.api.engines import SHORT, Caller, Gate, ask, ids, settle, tokens

FIXED, EACH = 3.4, 0.34  # ms of a step, and of each token in it: SmolLM2 on two quiet cores


class Clock:
    """The time of the driver: it passes in steps alone, by what they cost."""

    def __init__(self, llm: LLM) -> None:
        self.now = 0.0
        self.each = EACH
        self.sizes: list[int] = []
        engine = llm._driver._engine
        step = engine.step

        def costly(*limits: Any) -> Any:
            outputs = step(*limits)
            size = engine.scheduler.num_tokens
            self.sizes.append(size)
            self.now += (FIXED + self.each * size) / 1000
            return outputs

        engine.step = costly  # type: ignore[method-assign]

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def long(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, max_model_len=512) as llm:
        yield llm


@pytest.fixture
def clock(long: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(long)
    for module in (sdk.requests.driving.driver, sdk.requests.driving.step_sizes):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    long._driver._sizes = StepSizes(long._driver._engine.scheduler)
    yield clock
    del long._driver._engine.step  # type: ignore[attr-defined]
    long.reset_prefix_cache()


def _frames(llm: LLM, clock: Clock, ms: float) -> tuple[list[float], dict[str, list[int]]]:
    """How long each frame was over its time, and the answers."""
    over, answers = [], {}
    while llm.has_unfinished_requests:
        begin = clock.now
        for output in llm.pump(ms):
            answers[output.request_id] = tokens(output)
        over.append((clock.now - begin) * 1000 - ms)
    return over, answers


def test_frames_are_kept_with_long_prompts_waiting_and_answers_stay_the_same(
    long: LLM, clock: Clock
) -> None:
    prompts = [ids(seed, 400) for seed in (1, 2, 3)]
    expected = [tokens(output) for output in long.generate(prompts, SHORT)]
    long.reset_prefix_cache()
    clock.sizes.clear()
    names = long.enqueue(prompts, SHORT)
    over, answers = _frames(long, clock, 8.0)
    assert [answers[name] for name in names] == expected
    assert clock.sizes[0] == 4  # nothing was known
    assert max(over) <= 1.0
    # a frame holds a step of 13 tokens: 93 frames for the prompts alone
    assert len(over) < 1.3 * 1200 / ((8.0 - FIXED) / EACH)
    settle(long)


def test_answers_go_on_in_every_frame_while_a_prompt_is_read(long: LLM, clock: Clock) -> None:
    [name] = long.enqueue(ids(5), SHORT.clone(max_tokens=200))
    while not long.pump(8.0):
        pass
    long.enqueue(ids(6, 400), SHORT)
    known = 1
    for _ in range(20):
        new = [tokens(output) for output in long.pump(8.0) if output.request_id == name]
        assert len(new) == 1 and len(new[0]) > known
        known = len(new[0])
    long.abort([*long.enqueue(ids(1), SHORT), name])
    _frames(long, clock, 8.0)
    settle(long)


def test_without_any_time_one_step_runs_in_each_call(long: LLM, clock: Clock) -> None:
    long.enqueue(ids(7, 40), SHORT)
    steps = 0
    while long.has_unfinished_requests:
        long.pump(0)
        steps += 1
        assert len(clock.sizes) <= steps
    assert max(clock.sizes) < 40


def test_the_thread_of_other_callers_makes_short_steps_while_a_host_pumps(
    long: LLM, clock: Clock
) -> None:
    gate = Gate()
    long.enqueue(ids(8), SHORT.clone(max_tokens=60))
    long.pump(8.0)
    other = Caller(lambda: ask(long, 9, params=SHORT.clone(logits_processors=[gate])))
    gate.wait()
    late = Caller(lambda: long.generate(ids(10, 400), SHORT))
    while len(long._driver._sinks) < 3:
        time.sleep(0.001)
    clock.sizes.clear()
    gate.open()
    assert len(other.get()[0]) == 8 and late.get()[0].finished
    assert sum(clock.sizes[:3]) < 100  # and not 256 in the next
    _frames(long, clock, 8.0)
    clock.now += 5.0  # nobody pumps any more
    clock.sizes.clear()
    long.generate(ids(11, 400), SHORT)
    assert clock.sizes[0] == 256
    settle(long)


@pytest.mark.parametrize("value", [-1, math.nan])
def test_a_time_that_is_none_is_refused(tiny: LLM, value: float) -> None:
    with pytest.raises(RequestError, match="max_ms"):
        tiny.pump(value)


def test_all_the_time_there_is_finishes_everything_in_one_call(tiny: LLM) -> None:
    tiny.enqueue([ids(1, 50), ids(2, 50)], SHORT)
    outputs = tiny.pump(math.inf)
    assert [output.finished for output in outputs] == [True, True]


@pytest.mark.slow
@pytest.mark.model
def test_a_real_frame_loop_is_not_held_for_a_whole_prompt(smollm2: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompt = {"prompt_token_ids": [100 + i * 7919 % 40000 for i in range(700)]}
    with LLM(smollm2, max_model_len=1024) as llm:
        llm.generate(ids(1), params)
        llm.enqueue(prompt, params)
        longest = 0
        found: list[int] = []
        while llm.has_unfinished_requests:
            before = llm.get_metrics()["num_prompt_tokens"]
            for output in llm.pump(30.0):
                found = tokens(output)
            longest = max(longest, int(llm.get_metrics()["num_prompt_tokens"] - before))
        assert longest < 700
        llm.reset_prefix_cache()
        assert [tokens(output) for output in llm.generate(prompt, params)] == [found]


@pytest.mark.parametrize(("each", "most"), [(3.0, 117), (30.0, 64)])
def test_prompts_beside_answers_run_in_steps_of_a_third_of_a_second(
    long: LLM, clock: Clock, each: float, most: int
) -> None:
    """Of no fewer than 64 tokens: a model so slow would read its weights for next to nothing."""
    clock.each = each
    prompts = [ids(seed, 400) for seed in (4, 5)]
    expected = [tokens(output) for output in long.generate(prompts, SHORT)]
    alone = max(clock.sizes)
    assert alone == 256, "with nobody to wait for it a prompt runs as before"
    long.reset_prefix_cache()
    answer = long.stream(ids(6), SamplingParams(max_tokens=200, ignore_eos=True))
    next(answer)
    clock.sizes.clear()
    found = [tokens(output) for output in long.generate(prompts, SHORT)]
    list(answer)
    assert found == expected
    assert most // 2 < max(clock.sizes) <= most


def test_a_step_without_anything_to_run_teaches_nothing(long: LLM, clock: Clock) -> None:
    list(long.stream(ids(7, 100), SHORT))
    long.enqueue(ids(8), SHORT)
    long.pump(8)
    long.wait_for_completion()
    known = dict(vars(long._driver._sizes._costs))
    long.abort(long.enqueue(ids(9), SHORT))
    long.pump(8)
    assert vars(long._driver._sizes._costs) == known
