"""Several models in one budget: what each has for itself, and pages that go to and fro."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdk import LLM, MemoryPool, OutOfMemoryError, RequestError, SamplingParams
from tests.models.conftest import tiny
from tests.models.tiny_architectures import ARCHITECTURES
from tests.tiny_hybrids import tiny_hybrid

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
OPTIONS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}


def prompts(count: int, first: int = 3) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [first + (7 * i + 11 * j) % 400 for j in range(50)]}
        for i in range(count)
    ]


def tokens(llm: LLM, given: list[dict[str, list[int]]]) -> list[list[int]]:
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def own_bytes(path: Path) -> int:
    """What a model takes with the pages of one request."""
    page = LLM.plan(path).page_bytes
    return LLM.plan(path, **OPTIONS, kv_cache_memory_bytes=4 * page).total


def test_a_model_begins_with_the_pages_of_one_request_and_borrows_more(tiny_path: Path) -> None:
    page, own = LLM.plan(tiny_path).page_bytes, own_bytes(tiny_path)
    pool = MemoryPool(own + 8 * page)
    with LLM(tiny_path, memory=pool, **OPTIONS) as llm:
        assert llm.memory_plan.num_pages == 4
        assert pool.used == llm.memory_plan.total == own
        tokens(llm, prompts(4))
        assert llm.get_metrics()["num_pages"] == 12  # the fourth request waited
        assert pool.free == 0
        llm.trim()
        assert pool.used == own
        assert llm.get_metrics()["num_pages"] == 4
        with pytest.raises(RequestError, match="takes its pages from a memory pool"):
            llm.resize("1GiB")
    assert pool.used == 0


def test_pages_nobody_uses_go_to_the_model_that_needs_them(tiny_path: Path, golden: Path) -> None:
    other_path = golden / "gguf-Q4_1" / "model.gguf"
    page = LLM.plan(tiny_path).page_bytes
    assert LLM.plan(other_path).page_bytes == page
    pool = MemoryPool(own_bytes(tiny_path) + own_bytes(other_path) + 12 * page)
    with LLM(tiny_path, **OPTIONS) as alone:
        answers = tokens(alone, prompts(4))
    with (
        LLM(tiny_path, memory=pool, **OPTIONS) as first,
        LLM(other_path, memory=pool, **OPTIONS) as second,
    ):
        assert tokens(first, prompts(4)) == answers
        lent = first.get_metrics()["num_pages"]
        assert lent == 16
        assert pool.free == 0
        tokens(second, prompts(4))
        assert second.get_metrics()["num_pages"] == 16
        assert second.get_metrics()["num_preemptions"] == 0
        assert first.get_metrics()["num_pages"] == 4
        assert tokens(first, prompts(4)) == answers
        assert pool.used <= pool.budget


def test_models_that_compute_at_the_same_time_get_on_with_what_they_have(
    tiny_path: Path, golden: Path
) -> None:
    other_path = golden / "gguf-Q4_1" / "model.gguf"
    page = LLM.plan(tiny_path).page_bytes
    pool = MemoryPool(own_bytes(tiny_path) + own_bytes(other_path) + 3 * page)
    with LLM(tiny_path, **OPTIONS) as one, LLM(other_path, **OPTIONS) as two:
        expected = tokens(one, prompts(8)), tokens(two, prompts(8))
    with (
        LLM(tiny_path, memory=pool, **OPTIONS) as one,
        LLM(other_path, memory=pool, **OPTIONS) as two,
    ):
        one.enqueue(prompts(8), GREEDY)
        two.enqueue(prompts(8), GREEDY)
        found: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
        while one.has_unfinished_requests or two.has_unfinished_requests:
            for llm, answers in zip((one, two), found, strict=True):
                for output in llm.step():
                    answers[output.request_id] = list(output.outputs[0].token_ids)
            assert pool.used <= pool.budget
        assert tuple([answers[key] for key in sorted(answers)] for answers in found) == expected


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", "gemma3"])
def test_models_with_states_or_windows_lend_and_borrow(
    name: str, golden: Path, tiny_path: Path, tmp_path: Path
) -> None:
    """Memory is granted as pages, becomes frames and states, and goes back as pages."""
    path = golden / "arch-gemma3" / "hf" if name == "gemma3" else tiny_hybrid(name, tmp_path)
    options = {**OPTIONS, "max_num_seqs": 4, "skip_tokenizer_init": True, "num_threads": 1}
    given = [[3 + (7 * i + 11 * j) % 200 for j in range(50)] for i in range(6)]
    with LLM(path, **options) as llm:
        expected = tokens(llm, given)
        more = llm.memory_plan.kv_cache
    own = LLM.plan(path, memory=MemoryPool("1GiB"), **options)
    assert own.fits and 0 < own.kv_cache < more
    assert own.windows or own.states is not None
    pool = MemoryPool(own.total + own_bytes(tiny_path) + more)
    with (
        LLM(path, memory=pool, **options) as llm,
        LLM(tiny_path, memory=pool, **OPTIONS) as other,
    ):
        before = pool.used
        alone = tokens(other, prompts(4))
        other.trim()
        assert tokens(llm, given) == expected
        assert llm.get_metrics()["num_preemptions"] == 0
        assert pool.used > before and pool.used <= pool.budget
        assert tokens(other, prompts(4)) == alone  # with what the first one gives back
        assert tokens(llm, given) == expected
        llm.trim()
        other.trim()
        assert pool.used == before
        assert tokens(llm, given[:1]) == expected[:1]
    assert pool.used == 0


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_saved_states_borrow_from_the_pool_and_go_back_when_another_model_needs_memory(
    name: str, tiny_path: Path, tmp_path: Path
) -> None:
    """One request runs at a time, in the memory that the model owns: what it borrows are states and
    pages of prompts that have ended, so that all of them go on where they were."""
    path = tiny_hybrid(name, tmp_path)
    options = {**OPTIONS, "max_model_len": 128, "max_num_seqs": 8, "num_threads": 1}
    options |= {"skip_tokenizer_init": True}
    given = [[3 + (7 * i + 11 * j) % 200 for j in range(40)] for i in range(8)]
    own = LLM.plan(path, memory=MemoryPool("1GiB"), **options)
    assert own.states is not None
    room = 8 * (4 * own.page_bytes + 4 * own.states.slot_bytes)
    pool = MemoryPool(own.total + own_bytes(tiny_path) + room)
    with (
        LLM(path, memory=pool, **options) as llm,
        LLM(tiny_path, memory=pool, **OPTIONS) as other,
    ):
        before, answers = pool.used, [tokens(llm, [prompt])[0] for prompt in given]
        states = llm._driver.engine.scheduler.groups.states  # type: ignore[union-attr]
        assert states.capacity >= 2 * len(given)  # of each prompt and of each answer
        assert before < pool.used <= pool.budget
        for prompt, answer in zip(given, answers, strict=True):
            more = {"prompt_token_ids": [*prompt, *answer, 5]}
            [output] = llm.generate(more, GREEDY, use_tqdm=False)
            assert output.num_cached_tokens == len(prompt) + len(answer) - 1
        held = pool.used
        missing = pool.free + 3 * own.states.slot_bytes
        pool.make_room(missing)
        assert pool.free >= missing and pool.used < held
        assert tokens(other, prompts(4))
        pool.make_room(pool.budget)
        assert pool.used == before
        assert [tokens(llm, [prompt])[0] for prompt in given] == answers


def test_a_model_without_pages_owns_what_its_requests_need(tmp_path: Path) -> None:
    tiny("mamba2", **ARCHITECTURES["mamba2"]).save_pretrained(tmp_path)
    options = {**OPTIONS, "skip_tokenizer_init": True, "num_threads": 1}
    given = [[3 + (7 * i + 11 * j) % 60 for j in range(50)] for i in range(4)]
    with LLM(tmp_path, **options) as llm:
        expected = tokens(llm, given)
    pool = MemoryPool("1GiB")
    with LLM(tmp_path, memory=pool, **options) as llm:
        before = pool.used
        assert tokens(llm, given) == expected
        llm.trim()
        assert pool.used == before


def test_a_model_for_which_there_is_no_room_is_refused_with_what_everybody_holds(
    tiny_path: Path,
) -> None:
    own = own_bytes(tiny_path)
    pool = MemoryPool(own + own // 2)
    with LLM(tiny_path, memory=pool, **OPTIONS) as llm:
        with pytest.raises(OutOfMemoryError, match=r"does not fit|needs"):
            LLM(tiny_path, memory=pool, **OPTIONS)
        assert pool.used == own
        assert str(tiny_path) in str(pool)
        assert tokens(llm, prompts(1))


def test_on_pressure_is_told_how_much_is_short_and_may_make_room(tiny_path: Path) -> None:
    told: list[int] = []
    page, own = LLM.plan(tiny_path).page_bytes, own_bytes(tiny_path)
    sleeping: list[LLM] = []

    def on_pressure(pool: MemoryPool, missing: int) -> None:
        told.append(missing)
        while sleeping:
            sleeping.pop().close()

    pool = MemoryPool(2 * own + page, on_pressure=on_pressure)
    sleeping.append(LLM(tiny_path, memory=pool, **OPTIONS))
    with LLM(tiny_path, memory=pool, **OPTIONS) as llm:
        tokens(llm, prompts(4))
        assert told
        assert told[0] > 0
        assert llm.get_metrics()["num_pages"] == 16


def test_a_load_into_a_full_pool_asks_the_host_first(tiny_path: Path, golden: Path) -> None:
    told: list[int] = []
    loaded: list[LLM] = []

    def on_pressure(pool: MemoryPool, missing: int) -> None:
        told.append(missing)
        loaded.pop().close()

    own, other = own_bytes(tiny_path), own_bytes(golden / "gguf-Q4_1" / "model.gguf")
    pool = MemoryPool(max(own, other) + min(own, other) // 2, on_pressure=on_pressure)
    loaded.append(LLM(golden / "gguf-Q4_1" / "model.gguf", memory=pool, **OPTIONS))
    short = own - pool.free
    with LLM(tiny_path, memory=pool, **OPTIONS) as llm:
        assert told == [short]
        assert tokens(llm, prompts(1))
        assert pool.used == llm.memory_plan.total
    assert not loaded


def test_a_load_that_the_host_cannot_help_fails_with_the_sums_and_what_everybody_holds(
    tiny_path: Path,
) -> None:
    told: list[int] = []
    own = own_bytes(tiny_path)
    pool = MemoryPool(own + own // 2, on_pressure=lambda pool, missing: told.append(missing))
    with LLM(tiny_path, memory=pool, **OPTIONS) as llm:
        with pytest.raises(OutOfMemoryError) as error:
            LLM(tiny_path, memory=pool, **OPTIONS)
        assert told == [own - own // 2]
        for part in ("weights", "workspace", "KV cache", "the memory pool", str(tiny_path)):
            assert part in str(error.value)
        assert pool.used == own
        assert tokens(llm, prompts(1))


def test_nobody_is_asked_for_what_the_whole_pool_could_not_hold(tiny_path: Path) -> None:
    told: list[int] = []
    pool = MemoryPool(
        own_bytes(tiny_path) // 2, on_pressure=lambda pool, missing: told.append(missing)
    )
    with pytest.raises(OutOfMemoryError, match="does not fit"):
        LLM(tiny_path, memory=pool, **OPTIONS)
    assert not told


def test_a_callback_that_fails_hurts_nobody(tiny_path: Path) -> None:
    told: list[int] = []

    def on_pressure(pool: MemoryPool, missing: int) -> None:
        told.append(missing)
        raise RuntimeError("a host's mistake")

    pool = MemoryPool(own_bytes(tiny_path), on_pressure=on_pressure)
    with LLM(tiny_path, memory=pool, **OPTIONS) as llm:
        assert len(tokens(llm, prompts(4))) == 4
    assert len(told) == 1  # not in every step in which a request waits


def test_a_sleeping_model_lends_everything_and_takes_it_again(tiny_path: Path) -> None:
    pool = MemoryPool(own_bytes(tiny_path))
    with LLM(tiny_path, memory=pool, **OPTIONS) as llm:
        answers = tokens(llm, prompts(2))
        llm.sleep(2)
        assert pool.used == 0
        with LLM(tiny_path, memory=pool, **OPTIONS):
            with pytest.raises(OutOfMemoryError, match="wake_up"):
                llm.wake_up()
            with pytest.raises(RequestError, match="sleeps"):
                llm.generate([5, 6, 7])
        llm.wake_up()
        assert tokens(llm, prompts(2)) == answers


@pytest.mark.parametrize("budget", [0, -1, "lots", "6GiB GiB", None])
def test_a_pool_needs_a_size(budget: object) -> None:
    with pytest.raises(RequestError, match="MemoryPool: expected a size"):
        MemoryPool(budget)  # type: ignore[arg-type]


def test_what_only_a_load_needs_is_free_after_it(tmp_path: Path) -> None:
    """Rows of q, k and v that are moved: such a matrix is in memory twice while it is packed."""
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=1,
        num_attention_heads=16,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config).half().save_pretrained(tmp_path)
    few = {"max_model_len": 64, "max_num_seqs": 1, "max_num_batched_tokens": 16}
    few["skip_tokenizer_init"] = True
    plan = LLM.plan(tmp_path, **few)
    assert plan.serving < plan.total - 2**20
    pool = MemoryPool(plan.total)
    with LLM(tmp_path, memory=pool, **few) as llm:
        assert pool.used == plan.serving
        llm.sleep(2)
        assert pool.used == 0
        llm.wake_up()
        assert pool.used == plan.serving
