"""An LLM's memory while it lives: trimmed, resized, asleep; measured as the system sees it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from sdk import LLM, MemoryPool, OutOfMemoryError, RequestError, SamplingParams
from sdk.kernels.system import SYSTEM
from sdk.memory import resolve

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory and no file's."""
    gc.collect()
    SYSTEM.trim_heap()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise LookupError("RssAnon")


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [3 + (7 * i + 11 * j) % 400 for j in range(length)]}
        for i in range(count)
    ]


def tokens(llm: LLM, given: list[dict[str, list[int]]]) -> list[list[int]]:
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def filled(smollm2: Path) -> LLM:
    """64 pages of 360 KiB, all of them written."""
    llm = LLM(smollm2, max_model_len=256, max_num_seqs=4, skip_tokenizer_init=True)
    tokens(llm, prompts(4, 220))
    return llm


@pytest.mark.slow
def test_trim_returns_the_memory_of_pages_nobody_uses(filled: LLM) -> None:
    before = resident()
    answers = tokens(filled, prompts(2, 40))
    filled.trim()
    cache = filled.memory_plan.kv_cache
    assert cache == 64 * filled.memory_plan.page_bytes == 22.5 * MIB
    assert before - resident() > 0.9 * cache
    assert filled.get_metrics()["num_pages_cached"] == 0
    assert filled.get_metrics()["num_pages"] == 64
    assert tokens(filled, prompts(2, 40)) == answers
    filled.close()


@pytest.mark.slow
def test_asleep_an_llm_has_no_cache_or_no_weights_and_wakes_up_the_same(filled: LLM) -> None:
    answers = tokens(filled, prompts(2, 40))
    awake = resident()
    filled.sleep()
    light = resident()
    assert awake - light > 0.9 * filled.memory_plan.kv_cache
    for use in (lambda: filled.generate([5, 6]), filled.step, filled.explain, filled.trim):
        with pytest.raises(RequestError, match=r"sleeps \(level 1\): call wake_up\(\) first"):
            use()
    filled.wake_up()
    filled.wake_up()  # once is enough
    assert tokens(filled, prompts(2, 40)) == answers
    filled.sleep(2)
    assert awake - resident() > 0.9 * (filled.memory_plan.kv_cache + filled.memory_plan.weights)
    filled.wake_up()
    assert tokens(filled, prompts(2, 40)) == answers
    assert "cpu.linear" in filled.explain()
    filled.sleep(2)
    filled.close()


def test_who_has_unfinished_requests_does_not_go_to_sleep(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64) as llm:
        [request_id] = llm.enqueue([[5, 6, 7]], GREEDY)
        with pytest.raises(RequestError, match="unfinished"):
            llm.sleep()
        llm.abort(request_id)
        llm.wait_for_completion()
        with pytest.raises(RequestError, match="expected level 1 or 2, found 3"):
            llm.sleep(3)
        llm.sleep()


@pytest.mark.slow
def test_ranks_of_their_own_processes_sleep_and_wake_up(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, tensor_parallel_size=2, num_threads=2) as llm:
        answers = tokens(llm, prompts(2, 20))
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm, prompts(2, 20)) == answers


def test_requests_go_on_with_the_same_answers_while_the_cache_shrinks_and_grows(
    tiny_path: Path,
) -> None:
    options = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM(tiny_path, **options) as llm:
        answers = tokens(llm, prompts(4, 30))
        plan = llm.memory_plan
        fixed = plan.total - plan.kv_cache
        llm.reset_prefix_cache()
        llm.enqueue(prompts(4, 30), GREEDY)
        for _ in range(3):
            llm.step()
        assert llm.get_metrics()["num_running"] == 4
        smaller = llm.resize(fixed + 5 * plan.page_bytes)
        assert smaller == llm.memory_plan
        assert (smaller.num_pages, smaller.budget) == (5, fixed + 5 * plan.page_bytes)
        assert llm.get_metrics()["num_running"] < 4
        llm.step()
        assert llm.resize(plan.total).num_pages == plan.num_pages
        outputs = llm.wait_for_completion()
        assert [list(output.outputs[0].token_ids) for output in outputs] == answers
        assert llm.get_metrics()["num_preemptions"] >= 1


def test_a_cache_grows_beyond_what_it_began_with(tiny_path: Path) -> None:
    page = LLM.plan(tiny_path).page_bytes
    options = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 5 * page}
    with LLM(tiny_path, **options) as llm:
        plan = llm.memory_plan
        answers = tokens(llm, prompts(4, 30))
        assert llm.resize("1GiB").num_pages == 16  # four requests of full length
        llm.enqueue(prompts(4, 30), GREEDY)
        llm.step()
        assert llm.get_metrics()["num_running"] == 4
        outputs = llm.wait_for_completion()
        assert [list(output.outputs[0].token_ids) for output in outputs] == answers
        assert plan.num_pages == 5


def test_a_size_too_small_for_what_runs_changes_nothing(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, max_num_seqs=4) as llm:
        plan = llm.memory_plan
        fixed = plan.total - plan.kv_cache
        with pytest.raises(OutOfMemoryError, match="leave no room for a KV page: weights"):
            llm.resize(fixed)
        with pytest.raises(RequestError, match="resize: expected a size"):
            llm.resize("much")
        llm.enqueue(prompts(1, 50), SamplingParams(max_tokens=10, ignore_eos=True))
        llm.step()
        with pytest.raises(RequestError, match=r"2 KV pages of 16 tokens; expected 4"):
            llm.resize(fixed + 2 * plan.page_bytes)
        assert llm.memory_plan == plan
        assert llm.get_metrics()["num_pages"] == plan.num_pages
        assert len(llm.wait_for_completion()[0].outputs[0].token_ids) == 10


def test_a_size_larger_than_the_machine_changes_nothing(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_path, max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes="100KB") as llm:
        plan = llm.memory_plan
        with pytest.raises(OutOfMemoryError, match=r"at most the machine's .*, found 1024\.0 TiB"):
            llm.resize(2**50)
        monkeypatch.setattr(resolve, "available_memory", lambda: plan.page_bytes)
        with pytest.raises(
            OutOfMemoryError, match=r"KiB of new KV pages .* has only 16\.0 KiB left"
        ):
            llm.resize("1GiB")
        assert llm.memory_plan == plan
        assert llm.get_metrics()["num_pages"] == plan.num_pages
        assert llm.resize(plan.serving + plan.page_bytes).num_pages == plan.num_pages + 1


#: For llguidance to read the 448 entries of the tiny vocabulary.
VOCABULARY = 620 * 448
CHOICE = GREEDY.clone(structured_outputs={"choice": ["yes", "no"]})


def test_the_vocabulary_of_structures_takes_pages_of_a_full_budget(tiny_path: Path) -> None:
    whole = LLM.plan(tiny_path, max_model_len=128, max_num_seqs=4)
    options = {"max_model_len": 128, "max_num_seqs": 4, "memory": whole.total}
    with LLM(tiny_path, **options) as llm:
        before = llm.memory_plan
        answers = tokens(llm, prompts(4, 30))
        assert before.structures == 0 and "structures" not in str(before)
        [output] = llm.generate({"prompt_token_ids": [5, 9]}, CHOICE)
        assert output.outputs[0].text in ("yes", "no")
        after = llm.memory_plan
        assert after.structures == VOCABULARY and after.total <= whole.total
        missing = before.serving + VOCABULARY - whole.total
        assert before.num_pages - after.num_pages == -(-missing // before.page_bytes) > 0
        assert llm.get_metrics()["num_pages"] == after.num_pages
        assert "structures" in str(after)
        llm.generate({"prompt_token_ids": [5, 9]}, CHOICE.clone(seed=1))
        assert llm.memory_plan == after  # once
        assert tokens(llm, prompts(4, 30)) == answers
        smaller = llm.resize(whole.total - 2 * before.page_bytes)
        assert smaller.structures == VOCABULARY and smaller.num_pages == after.num_pages - 2


def test_without_a_budget_the_vocabulary_is_only_counted(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=128) as llm:
        before = llm.memory_plan
        llm.generate({"prompt_token_ids": [5, 9]}, CHOICE)
        after = llm.memory_plan
        assert after.num_pages == before.num_pages
        assert after.serving - before.serving == after.structures == VOCABULARY


def test_a_structure_without_room_is_refused_and_changes_nothing(tiny_path: Path) -> None:
    options = {"max_model_len": 128, "max_num_seqs": 6}
    memory = LLM.plan(tiny_path, **options).total
    with LLM(tiny_path, **options, memory=memory) as llm:
        before, kept = llm.memory_plan, prompts(5, 112)
        for prompt in kept:
            llm.pin(prompt)
        refused = r"structured output needs 271\.2 KiB .* raise memory"
        with pytest.raises(RequestError, match=refused):
            llm.generate({"prompt_token_ids": [5, 9]}, CHOICE)
        assert llm.memory_plan == before
        for prompt in kept:
            llm.unpin(prompt)
        llm.generate({"prompt_token_ids": [5, 9]}, CHOICE)
        assert llm.memory_plan.num_pages < before.num_pages


def test_a_pool_lends_the_memory_of_the_vocabulary(tiny_path: Path) -> None:
    need = LLM.plan(tiny_path, max_model_len=128, max_num_seqs=1).total
    for more, fits in ((VOCABULARY, True), (VOCABULARY - 1, False)):
        pool = MemoryPool(need + more)
        with LLM(tiny_path, max_model_len=128, max_num_seqs=1, memory=pool) as llm:
            llm.generate({"prompt_token_ids": [5, 9]}, GREEDY)
            used = pool.used
            if not fits:
                pool.budget = used + VOCABULARY - 1
                with pytest.raises(RequestError, match=r"its memory pool has 271\.2 KiB left"):
                    llm.generate({"prompt_token_ids": [5, 9]}, CHOICE)
                continue
            llm.generate({"prompt_token_ids": [5, 9]}, CHOICE)
            assert pool.used == used + VOCABULARY
        assert pool.used == 0
