"""Answers as they end: every prompt once, with its index, for threads and for event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams
from sdk.testing import FakeLLM
from tests.api.engines import LONG, SHORT, Gate, ids, settle, tokens


def test_answers_are_those_of_generate(llm: LLM) -> None:
    prompts = [ids(seed) for seed in range(9)]
    expected = [tokens(output) for output in llm.generate(prompts, SHORT)]
    found = dict(llm.as_completed(prompts, SHORT))
    assert [tokens(found[index]) for index in range(9)] == expected

    async def gather() -> dict[int, Any]:
        return {index: output async for index, output in llm.as_completed(iter(prompts), SHORT)}

    assert [tokens(asyncio.run(gather())[index]) for index in range(9)] == expected
    settle(llm)


def test_a_short_answer_does_not_wait_for_a_long_one() -> None:
    answers = {"long": "word " * 200, "short": "word"}
    all_read = threading.Event()

    def prompts() -> Iterator[str]:
        yield from ("long", "short", "short")
        all_read.set()

    def first_step(seconds: float) -> None:
        assert all_read.wait(60)

    with FakeLLM(answers, seconds_per_token=1.0, sleep=first_step) as llm:
        assert [index for index, _ in llm.as_completed(prompts())] == [1, 2, 0]


def test_prompts_are_read_as_the_engine_gets_to_them() -> None:
    read: list[int] = []

    def prompts() -> Iterator[str]:
        for index in range(1000):
            read.append(index)
            yield f"prompt {index}"

    with FakeLLM("yes", max_num_seqs=4, max_waiting=0) as llm:
        pairs = iter(llm.as_completed(prompts()))
        assert len(read) == 0
        for count in range(1, 21):
            next(pairs)
            assert len(read) <= count + 2 * 4
        pairs.close()  # type: ignore[attr-defined]
        assert len(read) < 100
        assert llm.generate("more")[0].text == "yes", "nothing is left in the queue"


def test_conversations_types_and_single_prompts() -> None:
    with FakeLLM(lambda prompt: '{"a": 1}') as llm:
        chats = [[{"role": "user", "content": str(i)}] for i in range(3)]
        assert sorted(i for i, _ in llm.as_completed(chats)) == [0, 1, 2]
        assert sorted(i for i, _ in llm.as_completed(chats[0])) == [0]
        assert [output.text for _, output in llm.as_completed("text")] == ['{"a": 1}']
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        [(_, output)] = llm.as_completed(["text"], returns=schema)
        assert output.outputs[0].parsed == {"a": 1}
        assert list(llm.as_completed([])) == []


def test_a_bad_prompt_is_named_and_ends_the_rest(llm: LLM) -> None:
    pairs = llm.as_completed([ids(1), ids(2), {"prompt_token_ids": [99999]}], LONG)
    with pytest.raises(RequestError, match=r"prompts\[2\]: prompt_token_ids: expected ids in"):
        list(pairs)
    settle(llm)
    with pytest.raises(TypeError, match="as_completed"):
        llm.as_completed([ids(1)], nonsense=True)
    with pytest.raises(RequestError, match="sampling_params: expected"):
        llm.as_completed([ids(1)], SamplingParams)  # type: ignore[call-overload]


def test_leaving_the_loop_aborts_the_rest(llm: LLM) -> None:
    for _ in llm.as_completed([ids(1), *(ids(seed) for seed in range(20))], LONG):
        break
    settle(llm)

    async def leave() -> None:
        pairs = llm.as_completed([ids(seed) for seed in range(20)], LONG).__aiter__()
        await anext(pairs)
        await pairs.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    settle(llm)


def test_a_cancelled_task_leaves_nothing_running(llm: LLM) -> None:
    gate = Gate(at=3)
    params = LONG.clone(logits_processors=[gate])

    async def main() -> None:
        async def consume() -> None:
            async for _ in llm.as_completed([ids(1), ids(2)], params):
                raise AssertionError("the gate is closed")

        task = asyncio.create_task(consume())
        await asyncio.to_thread(gate.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open()

    asyncio.run(main())
    settle(llm)
