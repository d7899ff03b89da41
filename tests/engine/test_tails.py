"""The first tokens of a page that is not full are copied, not computed again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.engine.pages import tails
from sdk.engine.plan import Duplicate


@pytest.fixture
def wide(rig: Any) -> Any:
    """Builds a Rig with pages of 16 tokens."""
    return partial(rig, page_size=16)


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * i) % 90 + 4 for i in range(length)]


def copied(plan: Any) -> int:
    return sum(isinstance(one, Duplicate) for one in plan.copies)


def started(plan: Any) -> dict[str, int]:
    return {start.request_id: start.num_computed for start in plan.started}


def test_requests_that_wait_for_a_prompt_copy_its_end(wide: Any) -> None:
    r = wide()
    for name in "abc":
        r.add(name, prompt(40))
    r.step()
    plan, _ = r.step()
    assert started(plan) == {"b": 39, "c": 39} and copied(plan) == 2
    r.run()
    r.assert_answers()


def test_a_request_that_goes_on_where_one_ended_copies_its_last_page(wide: Any) -> None:
    r = wide()
    first = r.add("a", prompt(40), max_tokens=1)
    r.run()
    r.add("b", [*first.token_ids, 5, 6])
    plan, _ = r.step()
    assert started(plan) == {"b": 40} and copied(plan) == 1
    r.run()
    r.assert_answers()


@pytest.mark.parametrize("common", [0, 1, 5])
def test_only_common_tokens_are_taken(wide: Any, common: int) -> None:
    r = wide()
    r.add("a", prompt(40), max_tokens=1)
    r.run()
    other = prompt(32 + common) + [99] * 5
    r.add("b", other)
    plan, _ = r.step()
    assert started(plan) == {"b": 32 + common} and copied(plan) == (common > 0)
    r.run()
    r.assert_answers()


def test_the_page_of_a_running_request_is_copied_while_it_goes_on(wide: Any) -> None:
    r = wide()
    r.add("a", prompt(40), max_tokens=60)
    for _ in range(30):
        r.step()
    r.add("b", [*prompt(40), 7])  # "a" has filled this page by now
    plan, _ = r.step()
    assert started(plan) == {"b": 40} and copied(plan) == 1
    r.run()
    r.assert_answers()


def test_a_short_prompt_has_a_tail_too_once_its_request_ended(wide: Any) -> None:
    r = wide()
    first = r.add("a", prompt(9), max_tokens=2)
    r.run()
    r.add("b", [*first.token_ids, 8])
    plan, _ = r.step()
    assert started(plan) == {"b": 10}
    r.run()
    r.assert_answers()


@pytest.mark.parametrize("how", ["salt", "error", "abort", "reset", "no cache"])
def test_tails_that_may_not_be_used_are_not(wide: Any, how: str) -> None:
    r = wide(enable_prefix_caching=how != "no cache")
    r.add("a", prompt(9), max_tokens=3)
    r.step()
    if how == "error":
        r.runner.errors = {"a": "NaN"}
    elif how == "abort":
        r.scheduler.queues.abort("a")
    r.run()
    if how == "reset":
        r.scheduler.reset_prefix_cache()
    r.add("b", prompt(12), salt="s" if how == "salt" else None)
    plan, _ = r.step()
    assert started(plan) == {"b": 0} and not copied(plan)
    r.run()
    del r.requests["a"]
    r.assert_answers()


def test_few_pages_are_kept(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "_MOST_KEPT", 3)
    r = wide()
    for number in range(5):
        r.add(str(number), prompt(9, number), max_tokens=1)
        r.run()
    assert r.pool.num_cached == 3
    for number, known in ((0, 0), (4, 9)):
        r.add(f"more {number}", [*prompt(9, number), 5], max_tokens=1)
        plan, _ = r.step()
        assert started(plan) == {f"more {number}": known}


def test_without_a_spare_page_the_end_is_computed(wide: Any) -> None:
    r = wide(num_pages=4)  # three
    first = r.add("a", prompt(40), max_tokens=1)
    r.run()
    r.add("b", [*first.token_ids, 5])
    plan, _ = r.step()
    assert started(plan) == {"b": 32} and not copied(plan)
    r.run()
    r.assert_answers()


def test_an_interrupted_copy_is_not_trusted(wide: Any) -> None:
    r = wide()
    first = r.add("a", prompt(40), max_tokens=1)
    r.run()
    r.add("b", [*first.token_ids, 5, 6])
    plan = r.scheduler.plan()
    assert copied(plan) == 1
    r.scheduler.rollback()
    r.scheduler.check()
    r.run()
    r.assert_answers()


TYPES = ["float16", "int16", "int8", "fp8", "int4", "k8v4"]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("options", [*TYPES, "policy", "eager", "ranks"])
def test_answers_have_the_bits_of_a_prompt_computed_alone(golden: Path, options: str) -> None:
    given: dict[str, Any] = {"kv_cache_dtype": options}
    length = 70
    if options == "policy":
        given, length = {"kv_policy": "fp16>int8"}, 200
    elif options == "eager":
        given = {"enforce_eager": True}
    elif options == "ranks":
        given = {"tensor_parallel_size": 2}
    path = golden / "gguf-Q8_0" / "model.gguf"
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=20, logprobs=2)
    asked = {"prompt_token_ids": prompt(length)}
    if options == "ranks":
        path = golden / "arch-llama3" / "hf"
    answers = []
    for caching in (True, False):
        with LLM(path, max_model_len=256, enable_prefix_caching=caching, **given) as llm:
            answers.append(llm.generate(asked, params)[0].outputs)
            ran = llm.get_metrics()["num_prompt_tokens"]
            assert ran == (length + 2 if caching else 3 * length)
    assert answers[0] == answers[1]
