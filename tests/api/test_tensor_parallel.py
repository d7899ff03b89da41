"""Two ranks through the public class: the same answers, and no hang when one breaks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sdk import LLM, AlignmentError, EngineDeadError, RequestOutput, SamplingParams
from tests.api.engines import LIMIT

ROOT = Path(__file__).parents[2]
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, a small"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _answers(model: Path, **options: Any) -> list[RequestOutput]:
    with LLM(model, max_model_len=128, num_threads=2, **options) as llm:
        return llm.generate(PROMPTS, GREEDY)


def _tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


@pytest.mark.model
@pytest.mark.slow
def test_two_ranks_give_the_tokens_of_one_with_exact_arithmetic(smollm2: Path) -> None:
    before = _children()
    one = _answers(smollm2, compute="exact")
    two = _answers(smollm2, compute="exact", tensor_parallel_size=2)
    assert [_tokens(output) for output in two] == [_tokens(output) for output in one]
    assert _children() == before


@pytest.mark.slow
@pytest.mark.model
def test_two_ranks_with_rounded_activations_leave_the_path_only_at_near_ties(smollm2: Path) -> None:
    """Each rank rounds its own slice of the activations to 8 bits, so logits differ a little.

    Up to the first difference both runs have seen the same tokens, whose log-probabilities moved by
    at most 0.21 when this was measured. So a token may only differ where the two best of one rank
    lie within twice that, and none may move by more.
    """
    one = _answers(smollm2)
    two = _answers(smollm2, tensor_parallel_size=2)
    noise = 0.42
    for alone, parallel in zip(one, two, strict=True):
        pairs = zip(_tokens(alone), _tokens(parallel), strict=True)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        rows, others = alone.outputs[0].logprobs, parallel.outputs[0].logprobs
        assert rows is not None and others is not None
        for token, row, other in list(zip(_tokens(alone), rows, others, strict=True))[:at]:
            assert abs(row[token].logprob - other[token].logprob) < noise
        if at is not None:
            best, second, *_ = sorted((x.logprob for x in rows[at].values()), reverse=True)
            assert best - second < noise, f"token {at}"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("adapters", [{}, {"enable_lora": True, "max_lora_rank": 8}], ids=str)
def test_steps_of_ranks_are_recorded_with_the_results_of_operators_one_by_one(
    tiny_path: Path, adapters: dict[str, Any]
) -> None:
    prompts = [{"prompt_token_ids": list(range(5 + i, 30 + 9 * i))} for i in range(3)]
    found = []
    for eager in (True, False):
        options = {"tensor_parallel_size": 2, "enforce_eager": eager, **adapters}
        options |= {"max_num_batched_tokens": 32, "max_num_seqs": 8}
        with LLM(tiny_path, max_model_len=128, **options) as llm:
            assert ("one recorded graph" in str(llm.explain())) is not eager
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert found[0] == found[1]


@pytest.fixture
def pair(tiny_path: Path) -> Iterator[tuple[LLM, psutil.Process]]:
    """A tiny engine of two ranks, and its worker."""
    before = _children()
    llm = LLM(tiny_path, max_model_len=512, tensor_parallel_size=2)
    [worker] = _children() - before
    yield llm, psutil.Process(worker)
    llm.close()
    assert _children() == before


@pytest.mark.slow
def test_a_killed_worker_is_an_error_for_everybody(
    pair: tuple[LLM, psutil.Process],
) -> None:
    llm, worker = pair
    prompt = {"prompt_token_ids": [5, 6, 7]}
    long = SamplingParams(max_tokens=None, ignore_eos=True)
    running, killed = threading.Event(), threading.Event()

    def hold(generated: Any, logits: Any) -> Any:
        running.set()
        assert killed.wait(60)
        return logits

    raised: list[BaseException] = []

    def wait(stream: bool, params: SamplingParams) -> None:
        try:
            if stream:
                list(llm.stream(prompt, params))
            else:
                llm.generate([prompt] * 2, params)
        except BaseException as error:
            raised.append(error)

    held = long.clone(logits_processors=[hold])
    threads = [
        threading.Thread(target=wait, args=args, daemon=True)
        for args in ((False, held), (False, long), (True, long))
    ]
    threads[0].start()
    assert running.wait(60)
    for thread in threads[1:]:
        thread.start()
    worker.kill()
    killed.set()
    for thread in threads:
        thread.join(LIMIT)  # a collective waits for 300 s
    assert not any(thread.is_alive() for thread in threads)
    assert [type(error) for error in raised] == [EngineDeadError] * 3
    for use in (
        lambda: llm.generate(prompt, long),
        lambda: llm.stream(prompt, long),
        llm.step,
    ):
        with pytest.raises(EngineDeadError):
            use()


@pytest.mark.slow
def test_a_worker_killed_between_two_calls_is_an_error_of_the_next(
    pair: tuple[LLM, psutil.Process],
) -> None:
    llm, worker = pair
    prompt = {"prompt_token_ids": [5, 6, 7]}
    assert llm.generate(prompt, SamplingParams(max_tokens=2))[0].finished
    worker.kill()
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            llm.generate(prompt, SamplingParams(max_tokens=2))


def test_a_model_that_cannot_be_cut_is_refused_before_a_process_starts(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _children()
    started: list[object] = []
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: started.append(args))
    for make in (LLM, LLM.plan):
        with pytest.raises(AlignmentError, match="4 query and 2 key/value heads over 5 ranks"):
            make(tiny_path, max_model_len=64, tensor_parallel_size=5)
    assert not started and _children() == before


@pytest.mark.slow
def test_a_script_needs_no_main_guard_and_leaves_no_process(
    tiny_path: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import sys
            sys.path.insert(0, sys.argv[2])
            import psutil
            from sdk import LLM, SamplingParams
            print("once")
            llm = LLM(sys.argv[1], max_model_len=64, tensor_parallel_size=2)
            [output] = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3))
            assert output.finished
            print(*[child.pid for child in psutil.Process().children()])
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tiny_path), str(ROOT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    once, worker = done.stdout.splitlines()
    assert once == "once" and not psutil.pid_exists(int(worker))
