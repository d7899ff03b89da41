"""A second tier for pages: what was thrown out comes back instead of being computed again."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sdk import LLM, OutOfMemoryError, RequestError, RequestOutput, SamplingParams

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=40, logprobs=2, ignore_eos=True)
PROMPTS = [[3 + (7 + j) * i % 400 for i in range(20)] for j in range(4)]


def _facts(output: RequestOutput) -> tuple[object, ...]:
    """Tokens and log-probabilities, exact floats included."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    steps = [sorted((t, x.logprob) for t, x in step.items()) for step in answer.logprobs]
    return tuple(answer.token_ids), steps


def _small(path: Path, **options: object) -> LLM:
    """Pages for two of the answers."""
    given = {name: options[name] for name in ("kv_cache_dtype", "swap_space") if name in options}
    page = LLM.plan(path, max_model_len=128, **given)
    frames = (4 * group.frame_bytes for group in page.windows)
    options["kv_cache_memory_bytes"] = 8 * page.page_bytes + sum(frames)
    return LLM(path, max_model_len=128, max_num_batched_tokens=17, max_num_seqs=4, **options)


@pytest.fixture(scope="module")
def alone(tiny_path: Path) -> list[tuple[object, ...]]:
    with LLM(tiny_path, max_model_len=128) as llm:
        return [_facts(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("dtype", ["auto", "int8", "k8v4", "int4:skip=1"])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_preempted_and_evicted_prefixes_come_back_as_they_were(
    tiny_path: Path, tmp_path: Path, dtype: str, where: str
) -> None:
    swap = {"swap_space": "4MiB", "swap_path": tmp_path if where == "file" else None}
    with LLM(tiny_path, max_model_len=128, kv_cache_dtype=dtype) as llm:
        alone = [_facts(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]
    with _small(tiny_path, kv_cache_dtype=dtype, **swap) as llm:
        together = llm.generate(PROMPTS, PARAMS)
        assert [_facts(output) for output in together] == alone
        assert sum(output.metrics.num_preemptions for output in together if output.metrics)
        before = llm.get_metrics()
        assert before["swapped_in"] > 0 and before["swap_pages_used"] > 0
        again = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        assert [_facts(output) for output in again] == alone
        assert [output.num_cached_tokens for output in again] == [16] * 4
        after = llm.get_metrics()
        # of each prompt only the last tokens ran: its full pages lay in one of the tiers
        assert after["num_prompt_tokens"] - before["num_prompt_tokens"] == 4 * 4
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_layers_with_sliding_windows_swap_too(golden: Path) -> None:
    path = golden / "arch-gemma3" / "hf"
    ids = [[3 + (7 + j) * i % 200 for i in range(40)] for j in range(4)]
    with LLM(path, max_model_len=128) as llm:
        alone = [_facts(llm.generate([prompt], PARAMS)[0]) for prompt in ids]
    with _small(path, swap_space="4MiB") as llm:
        for _ in range(2):  # the second time prompts are in the swap space
            assert [_facts(output) for output in llm.generate(ids, PARAMS)] == alone
        assert llm.get_metrics()["swapped_in"] > 0


@pytest.mark.slow
def test_two_ranks_swap_their_own_heads(tiny_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(tiny_path, max_model_len=128, compute="exact") as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
    options = {"compute": "exact", "swap_space": "4MiB", "tensor_parallel_size": 2}
    with _small(tiny_path, kv_cache_dtype="float32", **options) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)] == alone
        assert llm.get_metrics()["swapped_in"] > 0


def test_a_swap_space_that_is_full_loses_its_oldest_and_answers_stay(
    tiny_path: Path, alone: list[tuple[object, ...]]
) -> None:
    page = LLM.plan(tiny_path, max_model_len=128).page_bytes
    with _small(tiny_path, swap_space=2 * page) as llm:
        assert [_facts(output) for output in llm.generate(PROMPTS, PARAMS)] == alone
        metrics = llm.get_metrics()
        assert metrics["swap_pages"] == metrics["swap_pages_used"] == 2
        assert metrics["swapped_out"] > 2


def test_reset_prefix_cache_forgets_what_was_swapped(tiny_path: Path) -> None:
    with _small(tiny_path, swap_space="4MiB") as llm:
        llm.generate(PROMPTS, PARAMS)
        llm.reset_prefix_cache()
        assert llm.get_metrics()["swap_pages_used"] == 0
        [output] = llm.generate([PROMPTS[0]], PARAMS)
        assert output.num_cached_tokens == 0


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_answers_as_without_pressure(smollm2: Path) -> None:
    prompts = [f"Chapter {i}. It was a dark and stormy night, and the" for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    with LLM(smollm2, max_model_len=128) as llm:
        alone = [output.outputs[0].text for output in llm.generate(prompts, params)]
        page = llm.memory_plan.page_bytes
    options = {"kv_cache_memory_bytes": 12 * page, "swap_space": "64MiB"}
    with LLM(smollm2, max_model_len=128, **options) as llm:
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].text for output in outputs] == alone
        assert llm.get_metrics()["swapped_in"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": "lots"}, "swap_space: expected a size"),
        ({"swap_space": -1}, "swap_space: expected a size"),
        ({"swap_space": "1GiB", "enable_prefix_caching": False}, "enable_prefix_caching=True"),
        ({"swap_path": "/tmp"}, "needs a swap_space"),
        ({"swap_space": "1MiB", "swap_path": 5}, "swap_path: expected a folder, found 5"),
    ],
)
def test_options_that_cannot_work_are_refused(
    tiny_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(tiny_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swap_space": "2KiB"}, "a page of 16 tokens, 16.0 KiB, found 2.0 KiB"),
        ({"swap_space": "900TiB"}, "swap_space: 900.0 TiB, with .* is more than the"),
        ({"swap_space": "1MiB", "swap_path": "/nowhere"}, "cannot create a file in /nowhere"),
        ({"swap_space": "900TiB", "swap_path": "/tmp"}, "/tmp has no room for"),
    ],
)
def test_swap_space_that_is_not_there_is_refused_with_the_sums(
    tiny_path: Path, options: dict[str, object], message: str
) -> None:
    assert re.search(message, LLM.plan(tiny_path, max_model_len=128, **options).problem)
    with pytest.raises(OutOfMemoryError, match=message):
        LLM(tiny_path, max_model_len=128, **options)


@pytest.mark.parametrize("folder", [False, True])
def test_each_replica_needs_swap_space_of_its_own(
    tiny_path: Path, tmp_path: Path, folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = 64 << 20
    where = {"swap_path": str(tmp_path)} if folder else {}
    options = {"max_model_len": 128, "memory": "200MiB", "data_parallel_size": 3, **where}
    total = LLM.plan(tiny_path, **options, swap_space=0).total if not folder else 0

    def problem(free: int) -> str:
        with monkeypatch.context() as patch:
            if folder:
                found = SimpleNamespace(free=free)
                patch.setattr("sdk.engine.pages.disk_space.shutil.disk_usage", lambda _: found)
            else:
                patch.setattr("sdk.loading.checks.available_memory", lambda: free)
            return LLM.plan(tiny_path, **options, swap_space=swap).problem

    assert problem(total + 3 * swap) == ""
    assert "192.0 MiB" in problem(total + 3 * swap - 1)
