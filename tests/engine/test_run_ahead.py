"""Decode steps launched before the tokens of the last one are known: the same answers.

On a card made of the CPU's kernels (``fake_card.py``), whose bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_card import on_a_card
from torch import Tensor

from sdk import LLM, SamplingParams
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.rank import inputs
from sdk.engine.rank.run_ahead import Readback, RunAhead
from sdk.kernels import packed_shapes
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.mask_tasks import MaskTasks
from sdk.kernels.sized_graphs import StepGraphs
from tests.structured_answers import STRUCTURES

PROMPTS = [[5, 9, 30, 31, 200, 17], [44, 8], [7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


class Launches:
    """What was launched: of how many rows, and whether somebody asked for it later."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.read = 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    seen = Launches()
    launch, read = RunAhead._launch, Readback.read

    def launching(self: RunAhead, requests: Any, lengths: list[int]) -> Any:
        seen.rows.append(len(requests))
        return launch(self, requests, lengths)

    def reading(self: Readback) -> Any:
        seen.read += 1
        return read(self)

    monkeypatch.setattr(RunAhead, "_launch", launching)
    monkeypatch.setattr(Readback, "read", reading)
    return seen


@pytest.fixture
def path(golden: Path) -> Path:
    return golden / "gguf-Q8_0" / "model.gguf"


@contextmanager
def load(path: Path, *, ahead: bool, **options: Any) -> Iterator[LLM]:
    options = {"max_model_len": 96, "max_num_batched_tokens": 8, "max_num_seqs": 4} | options
    if not ahead:
        with LLM(path, enforce_eager=True, **options) as llm:
            yield llm
        return
    with on_a_card(path, **options) as (llm, _):
        yield llm


def job(name: str, prompt: list[int], params: SamplingParams) -> Job:
    return Job(SequenceSpec(name, params), tuple(prompt))


def params(length: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=length, **options)


def answers(llm: LLM, prompts: list[list[int]], wanted: list[SamplingParams]) -> list[Any]:
    found = [output.outputs[0] for output in llm.generate(prompts, wanted)]
    llm._driver._engine.scheduler.check()
    return [(x.token_ids, x.finish_reason, x.stop_reason) for x in found]


def both(path: Path, prompts: list[list[int]], wanted: list[SamplingParams], **options: Any) -> Any:
    """The answers of an engine that runs ahead and of one that does not."""
    found = []
    for ahead in (True, False):
        with load(path, ahead=ahead, **options) as llm:
            found.append(answers(llm, prompts, wanted))
    assert found[0] == found[1]
    return found[0]


def test_a_steady_batch_always_has_a_step_under_way(path: Path, launches: Launches) -> None:
    both(path, [[5, 9], [44, 8], [7, 7], [3, 1]], [params(40, ignore_eos=True)] * 4)
    # Each of the 39 steps is launched once and read, and the last was followed by one for nothing.
    assert launches.rows == [4] * 40
    assert launches.read == 39 + 1  # and the step with the prompts


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "ahead"),
    [
        ({"logit_bias": {9: 4.0}}, True),
        ({"allowed_token_ids": range(50, 90)}, True),
        ({"repetition_penalty": 1.3}, False),
        ({"no_repeat_ngram_size": 2}, False),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_changed_logits_are_drawn_in_the_graph(
    path: Path, launches: Launches, options: dict[str, Any], ahead: bool
) -> None:
    """One step ahead where the changes are known before the token."""
    wanted = [params(20, ignore_eos=True)] * 3 + [params(20, ignore_eos=True, **options)]
    both(path, [[5, 9], [44, 8], [7, 7], [3, 1]], wanted)
    assert launches.rows == [4] * (20 if ahead else 19)


@pytest.mark.slow
def test_changes_for_which_a_card_has_no_room_are_made_once_more(
    path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_shapes, "ENTRIES", 2)  # 8 for four rows
    wanted = [params(20, repetition_penalty=1.3, ignore_eos=True)] * 3 + [params(20)]
    both(path, PROMPTS, wanted)


def test_a_common_beginning_has_graphs_of_its_own(
    path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "_SHARED_REQUESTS", 3)
    monkeypatch.setattr(inputs, "_SHARED_TOKENS", 32)
    seen: list[tuple[int, bool, int]] = []
    decoding = inputs.StepInputs.decode_batch

    def looking(self: inputs.StepInputs, size: int, shared: bool) -> AttentionBatch:
        batch = decoding(self, size, shared)
        seen.append((size, shared, 0 if batch.shared_len is None else int(self._shared[0])))
        return batch

    monkeypatch.setattr(inputs.StepInputs, "decode_batch", looking)
    beginning = [token % 400 for token in range(7, 7 + 40)]
    prompts = [[*beginning, index] for index in range(3)]
    wanted = [params(length, ignore_eos=True) for length in (12, 9, 9)]
    replayed: list[Any] = []
    replay = StepGraphs.replay

    def replaying(self: StepGraphs[Any], size: int, shared: bool) -> Any:
        replayed.append((size, shared))
        return replay(self, size, shared)

    monkeypatch.setattr(StepGraphs, "replay", replaying)
    with load(path, ahead=True) as llm:
        found = answers(llm, prompts, wanted)
        steps = llm._runner().strategy.decodes.steps
        assert {(4, True), (4, False), (1, False)} <= set(steps.graphs.sizes)
    with load(path, ahead=False) as llm:
        assert answers(llm, prompts, wanted) == found
    assert {(4, True), (1, False)} <= set(replayed)  # two pages of 16 are common to three
    assert (4, True, 0) in seen  # captured without requests


def test_what_cannot_be_captured_runs_operator_by_operator(
    path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(self: StepGraphs[Any], kind: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    with load(path, ahead=True) as llm:
        found = answers(llm, PROMPTS, [params(9)] * 4)
        assert "not permitted when stream is capturing" in str(llm.explain())
    with load(path, ahead=False) as llm:
        assert answers(llm, PROMPTS, [params(9)] * 4) == found


@pytest.mark.slow
def test_requests_end_at_different_times_and_others_take_their_place(
    path: Path, launches: Launches
) -> None:
    lengths = [3, 17, 9, 30, 2, 21, 14, 5]
    wanted = [params(length, ignore_eos=True) for length in lengths]
    found = both(path, PROMPTS * 2, wanted)
    assert [len(tokens) for tokens, _, _ in found] == lengths
    assert launches.read > 20


@pytest.mark.slow
def test_a_token_that_ends_an_answer_ends_it_although_the_next_step_runs(
    path: Path, launches: Launches
) -> None:
    free = both(path, PROMPTS, [params(20, ignore_eos=True)] * 4)
    stops = [params(20, ignore_eos=True, stop_token_ids=[tokens[6]]) for tokens, _, _ in free]
    found = both(path, PROMPTS, stops)
    for (tokens, reason, _), (whole, _, _) in zip(found, free, strict=True):
        assert reason == "stop"
        assert tokens == whole[: whole.index(whole[6]) + 1]


def test_answers_that_are_not_plain_take_the_long_way(path: Path, launches: Launches) -> None:
    wanted = [
        params(12, logprobs=1),
        params(12, repetition_penalty=1.3),
        params(12, prompt_logprobs=1),
        SamplingParams(temperature=0.0, max_tokens=12),
    ]
    both(path, PROMPTS, wanted)


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {9: 3.0, 70: 100.0, 71: 99.9}},
        {"allowed_token_ids": range(60, 90)},
        {"no_repeat_ngram_size": 2},
        {"presence_penalty": 2.0, "mirostat_mode": 2},
    ],
)
def test_logits_that_change_before_their_draw_change_beside_others(
    path: Path, launches: Launches, options: Any
) -> None:
    wanted = [params(12), params(6, **options), params(12, **options), params(12)]
    found = both(path, PROMPTS, [one.clone(ignore_eos=True) for one in wanted])
    free = both(path, PROMPTS, [params(12, ignore_eos=True)] * 4)
    assert [found[i] == free[i] for i in range(4)] == [True, False, False, True]


@pytest.mark.slow
def test_masks_of_structured_answers_are_computed_while_the_model_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Next to free answers, with penalties, and with log-probabilities: the same answers."""
    order: list[str] = []
    replay, compute = StepGraphs.replay, MaskTasks.compute

    def replaying(self: StepGraphs, *bucket: Any) -> Any:
        order.append("launch")
        return replay(self, *bucket)

    def computing(self: MaskTasks) -> None:
        order.append("masks")
        compute(self)

    monkeypatch.setattr(StepGraphs, "replay", replaying)
    monkeypatch.setattr(MaskTasks, "compute", computing)
    structure, is_valid = STRUCTURES["object"]
    bound = params(80, structured_outputs=structure)
    wanted = [bound, params(60), bound.clone(repetition_penalty=1.3), bound.clone(logprobs=1)]
    with load(path, ahead=True) as llm:
        found = answers(llm, PROMPTS, wanted)
        texts = [output.outputs[0].text for output in llm.generate(PROMPTS, wanted)]
        assert all(is_valid(text) for text in (texts[0], *texts[2:]))
    launched = [i for i, name in enumerate(order) if name == "launch"]
    assert len(launched) > 40
    assert sum(order[i + 1 : i + 2] == ["masks"] for i in launched) > len(launched) // 2
    with load(path, ahead=False) as llm:
        assert answers(llm, PROMPTS, wanted) == found


@pytest.mark.slow
def test_an_answer_goes_back_while_steps_are_in_flight(path: Path, launches: Launches) -> None:
    """The step that was launched with its discarded token is not used."""
    banned = ["e", "th", "ro", "a", "o", "S"]
    wanted = [
        params(20),
        params(20, banned_strings=banned),
        params(12, banned_strings=banned, logprobs=1),
        params(20),
    ]
    found = both(path, PROMPTS, [one.clone(ignore_eos=True) for one in wanted])
    free = both(path, PROMPTS, [one.clone(ignore_eos=True, banned_strings=()) for one in wanted])
    assert [found[i] == free[i] for i in range(4)] == [True, False, False, True]


@pytest.mark.slow
def test_few_pages_preempt_and_nothing_is_lost(path: Path, launches: Launches) -> None:
    wanted = [params(60, ignore_eos=True)] * 4
    with load(path, ahead=False) as llm:
        memory = 9 * llm.memory_plan.page_bytes
    with load(path, ahead=True, kv_cache_memory_bytes=memory) as llm:
        found = answers(llm, PROMPTS, wanted)
        assert llm.get_metrics()["num_preemptions"] > 0
    with load(path, ahead=False) as llm:
        assert answers(llm, PROMPTS, wanted) == found
    assert len(launches.rows) > 60


def test_an_aborted_request_leaves_the_others_their_tokens(path: Path, launches: Launches) -> None:
    with load(path, ahead=False) as llm:
        wanted = answers(llm, PROMPTS, [params(20, ignore_eos=True)] * 4)
    with load(path, ahead=True) as llm:
        engine = llm._driver._engine
        for index, prompt in enumerate(PROMPTS):
            engine.add(job(str(index), prompt, params(20, ignore_eos=True)))
        found: dict[str, Any] = {}
        for step in range(200):
            found |= {output.request_id: output for output in engine.step()}
            if step == 9:
                engine.abort(["1"])
                engine.scheduler.check()
            if not engine.has_unfinished:
                break
    for name in ("0", "2", "3"):
        assert found[name].outputs[0].token_ids == wanted[int(name)][0]


@pytest.mark.slow
def test_logits_that_are_not_finite_fail_their_request_alone(
    path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(path, ahead=True) as llm:
        engine, runner = llm._driver._engine, llm._runner()
        inner = runner.model.logits
        with runner.entered():
            error = torch.zeros(1, device=runner.ops.device)

        def logits(hidden: Tensor, *out: Tensor) -> Tensor:
            found: Tensor = inner(hidden, *out)
            if len(found) == 2:
                found[1].add_(error)
            return found

        monkeypatch.setattr(runner.model, "logits", logits)
        with runner.entered():
            runner.record()
            runner.capture_all()
        for name, prompt in (("good", PROMPTS[0][:3]), ("bad", PROMPTS[2])):
            engine.add(job(name, prompt, params(16, ignore_eos=True)))
        found: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished:
            steps += 1
            if steps == 8:
                with runner.entered():
                    error.fill_(float("nan"))
            found |= {output.request_id: output.outputs[0] for output in engine.step()}
        engine.scheduler.check()
    assert found["bad"].finish_reason == "error"
    assert "not finite" in str(found["bad"].stop_reason)
    assert len(found["good"].token_ids) == 16


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"logprobs": 1}, {"repetition_penalty": 1.3}, {"prompt_logprobs": 0}],
    ids=lambda x: next(iter(x), "plain"),
)
def test_prompts_are_launched_beside_those_who_decode(path: Path, options: dict[str, Any]) -> None:
    """Two batches in flight; what the first is asked for later is not written over."""
    prompts = [[(7 * i + j) % 400 for j in range(9 + 3 * i)] for i in range(8)]
    wanted = [params(30, ignore_eos=True, **(options if i % 3 == 0 else {})) for i in range(8)]
    wide = {"max_num_seqs": 8, "max_num_batched_tokens": 16}
    with load(path, ahead=False, **wide) as llm:
        alone = [llm.generate(*one)[0] for one in zip(prompts, wanted, strict=True)]
    with load(path, ahead=True, **wide) as llm:
        engine, scheduler = llm._driver._engine, llm._driver._engine.scheduler
        scheduler.min_concurrent_tokens = 4
        found: dict[str, Any] = {}
        both = 0
        for burst in ([0, 1], [2, 3, 4], [5, 6, 7]):
            for i in burst:
                engine.add(job(str(i), prompts[i], wanted[i]))
            for _ in range(8):
                found |= {output.request_id: output for output in engine.step()}
                both += scheduler.num_in_flight  # one is left when a step has ended
                scheduler.check()
        while engine.has_unfinished:
            found |= {output.request_id: output for output in engine.step()}
    assert both >= 3
    for i, output in enumerate(alone):
        assert found[str(i)].outputs[0] == output.outputs[0]
        assert found[str(i)].prompt_logprobs == output.prompt_logprobs


def test_an_operation_between_two_steps_waits_for_what_is_in_flight(path: Path) -> None:
    prompts = [[(7 * i + j) % 400 for j in range(20)] for i in range(4)]
    wanted = [params(20, ignore_eos=True)] * 4
    wide = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    with load(path, ahead=False, **wide) as llm:
        alone = answers(llm, prompts, wanted)
    with load(path, ahead=True, **wide) as llm:
        engine, scheduler = llm._driver._engine, llm._driver._engine.scheduler
        scheduler.min_concurrent_tokens = 4
        names = [llm.enqueue(prompts[:1], wanted[:1])[0]]
        for _ in range(6):
            llm.step()
        names += llm.enqueue(prompts[1:], wanted[1:])
        seen = 0
        for _ in range(6):
            llm.step()
            seen += scheduler.num_in_flight
            llm.trim()
            assert scheduler.num_in_flight == 0
        assert seen and engine.dead is None
        done = {output.request_id: output.outputs[0] for output in llm.wait_for_completion()}
        for name, (tokens, _, _) in zip(names, alone, strict=True):
            assert list(done[name].token_ids) == list(tokens)
