"""Weights that lie on the disk: the same answers, a budget that holds, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, MemoryPool, OutOfMemoryError, RequestError, RequestOutput, SamplingParams

PARAMS = SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=2, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (7 + j) * i % 200 for i in range(20 + j)]} for j in range(3)]
LIMITS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 17}


def _facts(outputs: list[RequestOutput]) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities, exact floats included."""
    found: list[tuple[object, ...]] = []
    for output in outputs:
        answer = output.outputs[0]
        assert answer.logprobs is not None
        steps = [sorted((t, x.logprob) for t, x in step.items()) for step in answer.logprobs]
        found.append((tuple(answer.token_ids), steps))
    return found


def _answers(path: Path, **options: object) -> list[tuple[object, ...]]:
    with LLM(path, skip_tokenizer_init=True, **{**LIMITS, **options}) as llm:
        return _facts(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gguf-Q8_0/model.gguf", {}),
        ("gguf-Q8_0/model.gguf", {"enforce_eager": True}),
        ("gguf-Q8_0/model.gguf", {"compute": "exact", "num_threads": 1}),
        ("gguf-Q8_0/model.gguf", {"kv_cache_dtype": "int4"}),
        ("gguf-Q4_K_M/model.gguf", {}),
        ("gptq-w4-g128-act", {}),
        ("ct-w8a8-int8", {}),
        ("bnb-nf4-double", {}),
        ("gptoss-mxfp4", {}),
        ("arch-gemma3/hf", {"quantization": "int4"}),
    ],
)
def test_answers_are_the_same_bits_as_from_memory(
    golden: Path, model: str, options: dict[str, Any]
) -> None:
    path = golden / model
    with LLM(path, disk_offload="1GiB", skip_tokenizer_init=True, **{**LIMITS, **options}) as llm:
        plan = llm.memory_plan
        assert 0 < plan.offloaded < 2**30  # all that can go
        assert _facts(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == _answers(path, **options)
        [warning] = [line for line in llm.load_warnings if "read again in every step" in line]
        assert warning in llm.explain()
        assert "offloaded" in llm.explain()


@pytest.mark.slow
def test_two_ranks_have_a_file_each(tiny_path: Path) -> None:
    options = {"compute": "exact", "tensor_parallel_size": 2, "kv_cache_dtype": "float32"}
    alone = _answers(tiny_path, **options)
    assert _answers(tiny_path, disk_offload="1GiB", **options) == alone


def test_auto_moves_out_what_the_budget_cannot_hold(smollm2: Path) -> None:
    limits = {"max_model_len": 128, "max_num_seqs": 2, "skip_tokenizer_init": True}
    whole = LLM.plan(smollm2, **limits, disk_offload="auto")
    assert whole.fits and whole.offloaded == 0
    budget = whole.total - whole.kv_cache + whole.page_bytes * 8 - 30 * 2**20
    plan = LLM.plan(smollm2, **limits, disk_offload="auto", memory=budget)
    assert plan.fits and plan.total <= budget
    assert 30 * 2**20 < plan.offloaded < 45 * 2**20
    assert plan.weights + plan.offloaded == whole.weights
    assert plan.tokens_per_second(2e10) < whole.tokens_per_second(2e10) / 3
    assert plan.tokens_per_second(2e10, disk=4e9) > 2 * plan.tokens_per_second(2e10)
    with LLM(plan=plan) as llm:
        assert llm.memory_plan.offloaded == plan.offloaded
        assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].finished


def test_the_disk_is_proposed_last_and_named_as_slow(smollm2: Path) -> None:
    limits = {"max_model_len": 128, "max_num_seqs": 2, "skip_tokenizer_init": True}
    weights = LLM.plan(smollm2, **limits).weights
    plan = LLM.plan(smollm2, **limits, memory=weights)
    assert not plan.fits
    last = plan.alternatives[-1]
    assert dict(last.options) == {"disk_offload": "auto"}
    assert last.plan.fits and last.loss == 0 and last.keeps_limits
    assert "disk_offload='auto' needs" in plan.problem and "tokens/s with a disk" in plan.problem
    assert not any("disk_offload" in other.options for other in plan.alternatives[:-1])


def _open_files() -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(link.readlink()))
        except OSError:
            continue
    return {name for name in found if "(deleted)" in name}


def test_the_file_has_no_name_and_goes_with_the_engine(tiny_path: Path, tmp_path: Path) -> None:
    before = _open_files()
    llm = LLM(tiny_path, disk_offload="auto", memory="64MiB", **LIMITS)
    assert _open_files() == before  # all of it fits
    llm.close()
    with LLM(tiny_path, disk_offload="1GiB", disk_offload_path=tmp_path, **LIMITS) as llm:
        assert list(tmp_path.iterdir()) == []
        assert [name.startswith(str(tmp_path)) for name in _open_files() - before] == [True]
        before_sleep = _facts(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        llm.sleep(1)
        llm.wake_up()
        assert _facts(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == before_sleep
        llm.sleep(2)
        assert _open_files() == before
        llm.wake_up()
        assert _facts(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == before_sleep
        llm.trim()
        llm.resize("1GiB")
        assert _facts(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == before_sleep
    assert _open_files() == before


def test_a_pool_lends_for_what_stays_in_memory(tiny_path: Path) -> None:
    pool = MemoryPool("64MiB")
    options = {**LIMITS, "max_num_seqs": 1}
    with LLM(tiny_path, memory=pool, **options) as llm:
        whole = llm.memory_plan
    with LLM(tiny_path, memory=pool, disk_offload="1GiB", **options) as llm:
        assert llm.memory_plan.weights == whole.weights - llm.memory_plan.offloaded
        assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].finished
        assert pool.free < pool.budget - llm.memory_plan.weights
    assert pool.free == pool.budget


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_offload": "some"}, "disk_offload: expected a size"),
        ({"disk_offload": -1}, "disk_offload: expected a size"),
        ({"disk_offload": True}, "disk_offload: expected a size"),
        ({"cpu_offload": "1GiB"}, "cpu_offload: on a CPU .*disk_offload=1073741824 to leave them"),
        ({"cpu_offload": "auto"}, "cpu_offload: on a CPU .*disk_offload='auto' to leave them"),
        (
            {"device": "cuda", "disk_offload": "auto"},
            "disk_offload: .* not to its disk; use cpu_offload='auto'",
        ),
        ({"disk_offload_path": "/tmp"}, "disk_offload_path='/tmp' needs a disk_offload"),
        ({"disk_offload": "auto", "disk_offload_path": 5}, "expected a folder, found 5"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    tiny_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        LLM(tiny_path, **options)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("/nowhere", "disk_offload: cannot create a file in /nowhere"),
        ("/dev/shm", "files in /dev/shm are kept in memory; set disk_offload_path"),
    ],
)
def test_folders_without_a_disk_are_refused(tiny_path: Path, folder: str, message: str) -> None:
    before = _open_files()
    with pytest.raises(OutOfMemoryError, match=message):
        LLM(tiny_path, disk_offload="1GiB", disk_offload_path=folder, **LIMITS)
    assert _open_files() == before


def test_a_disk_without_room_is_refused_with_the_sums(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = r"has no room for .*iB of weights: .*iB are free \(.*No space"
    with pytest.raises(OutOfMemoryError, match=message):
        LLM(tiny_path, disk_offload="1GiB", **LIMITS)
