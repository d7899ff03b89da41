"""Models with states or windows through ``LLM``: preempted answers are those of undisturbed ones,
and the prefix cache never makes more work than it saves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from tests.tiny_hybrids import HYBRIDS, tiny_hybrid

PAGE = 16
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "num_threads": 1,
}


@pytest.fixture(scope="module", params=[*HYBRIDS, "windows"])
def path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, golden: Path
) -> Path:
    if request.param == "windows":
        return golden / "arch-gemma3" / "hf"
    return tiny_hybrid(request.param, tmp_path_factory.mktemp(request.param))


def few_bytes(path: Path) -> int:
    """A KV cache with half of the pages that four requests need."""
    plan = LLM.plan(path, **OPTIONS)
    slot = 0 if plan.states is None else plan.states.slot_bytes
    frames = sum(group.frame_bytes * 4 * (group.window // PAGE + 2) for group in plan.windows)
    return 22 * plan.page_bytes + frames + 6 * slot


def text(length: int, seed: int) -> list[int]:
    return [3 + (seed * 71 + 31 * i + i * i) % 90 for i in range(length)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


class Work:
    """What an ``LLM`` has done: tokens that ran, and the most pages that requests held at once."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokens, self.pages = llm, 0, 0
        runner = llm._runner()
        launch = runner.launch

        def counting(plan: Any) -> Any:
            self.tokens += sum(row.num_scheduled_tokens for row in plan.rows)
            self.pages = max(self.pages, int(llm.get_metrics()["num_pages_used"]))
            return launch(plan)

        runner.launch = counting  # type: ignore[method-assign]

    def answers(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(given, greedy(count), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def opened(path: Path, **options: Any) -> Iterator[Work]:
    with LLM(path, **{**OPTIONS, **options}) as llm:
        yield Work(llm)


PROMPTS = [text(40 + 9 * seed, seed) for seed in range(4)]


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_preempted_answers_are_those_of_requests_that_run_alone(path: Path, eager: bool) -> None:
    with opened(path, enforce_eager=eager) as whole:
        alone = [whole.answers([prompt], 110)[0] for prompt in PROMPTS]
    with opened(path, enforce_eager=eager, kv_cache_memory_bytes=few_bytes(path)) as few:
        found = few.answers(PROMPTS, 110)
        assert few.llm.get_metrics()["num_preemptions"] > 0
    assert found == alone


def test_answers_that_are_drawn_survive_preemption_too(path: Path) -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=110, ignore_eos=True, repetition_penalty=1.2)
        for seed in range(len(PROMPTS))
    ]
    found = []
    for memory in (None, few_bytes(path)):
        with opened(path, kv_cache_memory_bytes=memory) as work:
            given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            outputs = work.llm.generate(given, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            preempted = work.llm.get_metrics()["num_preemptions"]
    assert preempted > 0 and found[0] == found[1]


@pytest.mark.parametrize("in_file", [False, True])
def test_what_preempted_requests_had_comes_back_from_the_swap_space(
    path: Path, in_file: bool, tmp_path: Path
) -> None:
    """Pages, frames and states: answers are the same to the bit, and fewer tokens run."""
    with opened(path) as whole:
        alone = [whole.answers([prompt], 110)[0] for prompt in PROMPTS]
    ran = []
    for swap in (0, 2**24):
        folder = tmp_path if in_file and swap else None
        options = {"swap_space": swap, "swap_path": folder}
        with opened(path, kv_cache_memory_bytes=few_bytes(path), **options) as few:
            assert few.answers(PROMPTS, 110) == alone
            assert few.llm.get_metrics()["num_preemptions"] > 0
            ran.append(few.tokens)
            metrics = few.llm.get_metrics()
    assert metrics["swapped_in"] > 0 and metrics["swap_failed"] == 0
    least = sum(len(prompt) + 109 for prompt in PROMPTS)
    assert least <= ran[1] < ran[0]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_swap_their_parts(path: Path, split: str) -> None:
    """With ranks heads are split, and with stages layers: each rank copies what it has."""
    options = {split: 2, "kv_cache_memory_bytes": few_bytes(path)}
    prompts = [*PROMPTS, *PROMPTS[:2]]
    found = []
    for swap in (0, 2**24):
        with LLM(path, **{**OPTIONS, **options}, swap_space=swap) as llm:
            given = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(given, greedy(110), use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            metrics = llm.get_metrics()
    assert metrics["num_preemptions"] > 0 and metrics["swapped_in"] > 0
    assert found[0] == found[1]


def other_prompts(work: Work) -> list[list[int]]:
    return work.answers(PROMPTS, 60)


def one_beginning(work: Work) -> list[list[int]]:
    prompts = [text(70, 9) + text(20, seed) for seed in range(4)]
    return work.answers(prompts, 20) + work.answers(prompts, 20)


def turns(work: Work) -> list[list[int]]:
    said, found = text(30, 4), []
    for turn in range(4):
        [answer] = work.answers([said], 20)
        found.append(answer)
        said = said + answer + text(9, 20 + turn)
    return found


def short(work: Work) -> list[list[int]]:
    return [work.answers([text(5, seed % 3)], 4)[0] for seed in range(9)]


@pytest.mark.parametrize("memory", ["enough", "few"])
def test_a_prefix_cache_never_makes_more_work(path: Path, memory: str) -> None:
    nbytes = few_bytes(path) if memory == "few" else None
    found = []
    for cached in (True, False):
        with opened(path, enable_prefix_caching=cached, kv_cache_memory_bytes=nbytes) as work:
            counts = []
            for pattern in (other_prompts, one_beginning, turns, short):
                work.tokens = work.pages = 0
                answers = pattern(work)
                counts.append((answers, work.tokens, work.pages))
            found.append((counts, work.llm.get_metrics()["num_preemptions"]))
    (with_cache, preempted), (without, most) = found
    for (answers, tokens, pages), (expected, most_tokens, most_pages) in zip(
        with_cache, without, strict=True
    ):
        assert answers == expected
        assert tokens <= most_tokens
        if memory == "enough":  # else more requests may run at once, because they share pages
            assert pages <= most_pages
    assert with_cache[2][1] < without[2][1], "turns of a conversation gained nothing"
    assert preempted <= most
