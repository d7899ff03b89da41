"""``AsyncLLM.generate`` means what vLLM's does: kinds of output, request ids of the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sdk import LLM, AsyncLLM, RequestError, RequestOutput, RequestOutputKind, SamplingParams

PROMPT = {"prompt_token_ids": [5, 9, 200, 31]}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
Collect = Callable[[Any], list[RequestOutput]]


@pytest.fixture
def collect() -> Collect:
    def run(stream: Any) -> list[RequestOutput]:
        async def read() -> list[RequestOutput]:
            return [output async for output in stream]

        reading: Coroutine[Any, Any, list[RequestOutput]] = read()
        return asyncio.run(reading)

    return run


def test_outputs_hold_all_of_the_answer_unless_deltas_are_asked_for(
    tiny: LLM, collect: Collect
) -> None:
    [whole] = tiny.generate(PROMPT, PARAMS)
    answer = list(whole.outputs[0].token_ids)
    every = collect(AsyncLLM(tiny).generate(PROMPT, PARAMS))
    lengths = [len(output.outputs[0].token_ids) for output in every]
    assert lengths == sorted(set(lengths)) and list(every[-1].outputs[0].token_ids) == answer
    assert every[-1].outputs[0].text == whole.outputs[0].text
    deltas = collect(
        AsyncLLM(tiny).generate(PROMPT, PARAMS.clone(output_kind=RequestOutputKind.DELTA))
    )
    assert [t for output in deltas for t in output.outputs[0].token_ids] == answer
    assert len(deltas[-1].outputs[0].token_ids) < len(answer)


def test_the_last_output_alone_comes_where_that_is_asked_for(tiny: LLM, collect: Collect) -> None:
    final = PARAMS.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    [whole] = tiny.generate(PROMPT, PARAMS)
    for outputs in (
        collect(AsyncLLM(tiny).generate(PROMPT, final)),
        collect(tiny.astream(PROMPT, final)),
        list(tiny.stream(PROMPT, final)),
    ):
        assert len(outputs) == 1 and outputs[0].finished
        assert outputs[0].outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_stream_of_llm_gives_what_is_new(tiny: LLM, collect: Collect) -> None:
    [whole] = tiny.generate(PROMPT, PARAMS)
    for outputs in (list(tiny.stream(PROMPT, PARAMS)), collect(tiny.astream(PROMPT, PARAMS))):
        text = "".join(output.outputs[0].text for output in outputs)
        assert text == whole.outputs[0].text


def test_a_request_has_the_callers_id_and_is_aborted_by_it(tiny: LLM) -> None:
    engine = AsyncLLM(tiny)

    async def read() -> list[RequestOutput]:
        outputs = []
        stream = engine.generate(PROMPT, PARAMS.clone(max_tokens=100), "mine")
        async for output in stream:
            outputs.append(output)
            engine.abort("mine")
        return outputs

    outputs = asyncio.run(read())
    assert {output.request_id for output in outputs} == {"mine"}
    assert outputs[-1].outputs[0].finish_reason == "abort"


def test_a_bad_request_is_refused_at_the_call(tiny: LLM) -> None:
    engine = AsyncLLM(tiny)
    with pytest.raises(RequestError, match="request_id"):
        engine.generate(PROMPT, PARAMS, "")
    with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'tool'"):
        engine.generate([{"role": "user", "content": "Hi"}], PARAMS, tool=[])
