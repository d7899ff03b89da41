"""The public class when something goes wrong in a step: NaN, callbacks, names, deadlines."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, EngineClosedError, EngineDeadError, RequestError, RequestOutput, SamplingParams
from sdk.engine.rank.recorded import Recorded
from tests.api.engines import LONG, SHORT, Caller, Gate, ask, books, ids, settle, tokens


@pytest.mark.parametrize("kind", ["only tokens", "logprobs beside them"])
def test_nan_logits_end_exactly_their_request(llm: LLM, kind: str) -> None:
    expected = ask(llm, 1, 2, 3)
    llm.reset_prefix_cache()
    runner = llm._runner()
    assert runner is not None and isinstance(runner.strategy, Recorded)
    graph, calls = runner.strategy.graph, 0
    replay, again = graph.replay, graph.replay_again

    @torch.inference_mode()
    def poison(logits: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            logits[1, 5] = math.nan
            runner.ops.sampling.sample_into(logits[:3], runner._inputs.sampling)

    def poisoned(**counts: int) -> None:
        replay(**counts)
        poison(graph.result[1])

    def poisoned_again() -> None:
        again()
        poison(graph.result[1])

    graph.replay, graph.replay_again = poisoned, poisoned_again
    params = [SHORT, SHORT, SHORT if kind == "only tokens" else SHORT.clone(logprobs=1)]
    good, bad, other = llm.generate([ids(1), ids(2), ids(3)], params)
    assert [tokens(good), tokens(other)] == [expected[0], expected[2]]
    assert bad.outputs[0].finish_reason == "error" and tokens(bad) == expected[1][:3]
    assert "not finite" in str(bad.outputs[0].stop_reason)
    assert ask(llm, 2) == [expected[1]]
    settle(llm)


@pytest.mark.parametrize("compute", ["auto", "exact"])
def test_pages_with_nan_reach_neither_neighbours_nor_the_next_owner(
    tiny_path: Path, compute: str
) -> None:
    with LLM(tiny_path, max_model_len=128, compute=compute) as llm:
        expected = ask(llm, 1, 2, 3, 4, 5, 6)
        llm.reset_prefix_cache()
        names = llm.enqueue([ids(1), ids(2), ids(3)], SHORT)
        llm.step()
        runner = llm._runner()
        assert runner is not None
        [victim] = [r for r in books(llm).queues.running if r.request_id == names[1]]
        pages = list(victim.pages)
        for layer in runner.kv.layers:
            layer.k[pages] = math.nan
            layer.v[pages] = math.nan
        good, bad, other = llm.wait_for_completion()
        assert [tokens(good), tokens(other)] == [expected[0], expected[2]]
        assert bad.outputs[0].finish_reason == "error" and tokens(bad) == expected[1][:1]
        llm.enqueue([ids(4), ids(5), ids(6)], SHORT)
        llm.step()
        used = {page for request in books(llm).queues.running for page in request.pages}
        assert used & set(pages), "the poisoned page is used again"
        assert [tokens(output) for output in llm.wait_for_completion()] == expected[3:]
        assert ask(llm, 2) == [expected[1]], "nothing of the failed request was cached"


def test_an_embedding_that_is_not_finite_is_an_error(llm: LLM) -> None:
    runner = llm._runner()
    assert runner is not None
    graph = runner.strategy.graph
    replay = graph.replay

    def poisoned(**counts: int) -> None:
        replay(**counts)
        graph.result[0].numpy()[:] = math.nan

    graph.replay = poisoned
    with pytest.raises(RequestError, match="hidden state is not finite"):
        llm.embed([ids(1)])
    graph.replay = replay
    assert len(llm.embed([ids(1)])[0].embedding) == llm.model_config.hidden_size
    settle(llm)


def test_an_exception_in_on_progress_aborts_only_that_call(tiny_path: Path) -> None:
    main = threading.current_thread()

    def follow(stage: str, done: int, total: int) -> None:
        if stage == "generate" and threading.current_thread() is main:
            raise ZeroDivisionError

    with LLM(tiny_path, max_model_len=128, on_progress=follow) as llm:
        first, rest = Gate(), Gate(at=20)
        other = Caller(lambda: ask(llm, 1, 2, params=LONG.clone(logits_processors=[first])))
        first.wait()
        first.open()
        with pytest.raises(ZeroDivisionError):
            llm.generate([ids(3), ids(4)], [SHORT, LONG.clone(logits_processors=[rest])])
        rest.open()
        answers = other.get()
        assert [len(answer) for answer in answers] == [100, 100]
        assert rest.calls <= 20
        assert answers == [tokens(o) for o in _collect(llm, [ids(1), ids(2)], LONG)]


def _collect(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
    llm.enqueue(prompts, params)
    return llm.wait_for_completion()


def test_a_slow_logits_processor_delays_but_loses_nothing(tiny: LLM) -> None:
    expected = ask(tiny, 1, 2, 3)
    gate = Gate(at=3)
    slow = Caller(lambda: ask(tiny, 1, params=SHORT.clone(logits_processors=[gate])))
    gate.wait()
    meanwhile = [Caller(lambda seed=seed: ask(tiny, seed)) for seed in (2, 3)]
    stream = tiny.stream(ids(4), LONG)
    stream.close()
    gate.open()
    assert slow.get() == [expected[0]]
    assert [caller.get() for caller in meanwhile] == [[expected[1]], [expected[2]]]
    settle(tiny)


@pytest.mark.parametrize("use", ["generate", "stream", "step", "pump", "wait_for_completion"])
def test_a_logits_processor_that_uses_its_own_engine_is_an_error_of_that_request(
    tiny: LLM, use: str
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: tiny.generate(ids(1), SHORT),
        "stream": lambda: tiny.stream(ids(1), SHORT),
        "step": tiny.step,
        "pump": lambda: tiny.pump(1),
        "wait_for_completion": tiny.wait_for_completion,
    }

    def nested(generated: Any, logits: Any) -> Any:
        calls[use]()
        return logits

    bad, good = tiny.generate([ids(1), ids(2)], [SHORT.clone(logits_processors=[nested]), SHORT])
    assert bad.outputs[0].finish_reason == "error"
    assert "its own step would never end" in str(bad.outputs[0].stop_reason)
    assert len(tokens(good)) == 8
    settle(tiny)


def test_a_logits_processor_may_close_its_engine(tiny_path: Path) -> None:
    llm = LLM(tiny_path, max_model_len=128)
    threads = threading.active_count()

    def close(generated: Any, logits: Any) -> Any:
        llm.close()
        return logits

    caller = Caller(lambda: ask(llm, 1, params=LONG.clone(logits_processors=[close])))
    assert isinstance(caller.get(), EngineClosedError)
    llm.close()
    assert threading.active_count() == threads


def test_a_logits_processor_that_exits_is_an_error_and_not_a_hang(llm: LLM) -> None:
    def leave(generated: Any, logits: Any) -> Any:
        raise SystemExit(1)

    caller = Caller(lambda: ask(llm, 1, params=SHORT.clone(logits_processors=[leave])))
    assert isinstance(caller.get(), EngineDeadError) and "SystemExit" in str(caller.result)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": []}, "tools cannot be set here"),
        ({"chat_template": "x", "messages": 1}, "chat_template, messages cannot be set here"),
        ({"add_generation_prompt": True}, "add_generation_prompt cannot be set here"),
        ([1], "expected a dict with names as keys"),
        ({1: 2}, "expected a dict with names as keys"),
    ],
)
def test_reserved_names_in_chat_template_kwargs_are_refused(
    tiny: LLM, given: Any, message: str
) -> None:
    chat = [{"role": "user", "content": "hello"}]
    template = "{{ messages[0].content }}{{ mood }}"
    with pytest.raises(RequestError, match=message):
        tiny.chat(chat, SHORT, chat_template=template, chat_template_kwargs=given)
    [output] = tiny.chat(
        chat, SHORT, chat_template=template, chat_template_kwargs={"mood": " there"}
    )
    assert "hello there" in str(output.prompt)


def test_a_deadline_keeps_what_was_generated(llm: LLM) -> None:
    [expected] = ask(llm, 1)
    late = 0.0
    books(llm).queues.clock = lambda: time.monotonic() + late
    calls = 0

    def pass_time(generated: Any, logits: Any) -> Any:
        nonlocal late, calls
        calls += 1
        late = 1000.0 if calls == 3 else late
        return logits

    params = LONG.clone(deadline=500.0, logits_processors=[pass_time])
    [output] = llm.generate(ids(1), params)
    assert output.outputs[0].finish_reason == "deadline" and tokens(output) == expected[:3]
    settle(llm)


@pytest.mark.parametrize("max_tokens", [None, 1000])
def test_an_answer_to_the_end_of_the_context_ends_with_length(
    tiny: LLM, max_tokens: int | None
) -> None:
    [output] = tiny.generate(ids(1, 100), LONG.clone(max_tokens=max_tokens))
    assert len(tokens(output)) == 28 and output.outputs[0].finish_reason == "length"


def test_prefixes_are_found_within_one_salt_and_not_after_a_reset(tiny: LLM) -> None:
    def cached(salt: str | None) -> int | None:
        prompt = ids(77, 40) if salt is None else {**ids(77, 40), "cache_salt": salt}
        [output] = tiny.generate(prompt, SHORT)
        answers.add(tuple(tokens(output)))
        return output.num_cached_tokens

    answers: set[tuple[int, ...]] = set()
    tiny.reset_prefix_cache()
    found = [cached("a"), cached("a"), cached("b"), cached(None), cached(None), cached("b")]
    assert found == [0, 39, 0, 0, 39, 39]
    assert tiny.reset_prefix_cache()
    assert [cached("a"), cached(None), cached("a")] == [0, 0, 39]
    assert len(answers) == 1


def test_priorities_decide_who_runs_first(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, max_num_seqs=1, scheduling_policy="priority") as llm:
        names = llm.enqueue([ids(seed) for seed in range(4)], SHORT, priority=[3, -1, 2, -1])
        finished = []
        while llm.has_unfinished_requests:
            finished += [output.request_id for output in llm.step() if output.finished]
        assert finished == [names[1], names[3], names[2], names[0]]
