"""``AsyncLLM.generate`` means what vLLM's does: kinds of output, request ids of the caller's."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from sdk import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    UnsupportedError,
)
from sdk.testing import FakeLLM
from tests.api.engines import Caller, Gate, settle

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
    aborted = threading.Event()

    def gate(tokens: list[int], logits: Any) -> Any:
        """The second token waits until the first one is read, however slow the reader is."""
        if tokens:
            aborted.wait(60)
        return logits

    async def read() -> list[RequestOutput]:
        outputs = []
        params = PARAMS.clone(max_tokens=100, logits_processors=[gate])
        async for output in engine.generate(PROMPT, params, "mine"):
            outputs.append(output)
            engine.abort("mine")
            aborted.set()
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


#: Methods of LLM that return at once, that step by hand, that act between two steps, or that have
#: both kinds of loops.
NOT_ASYNC = {
    "abort", "as_completed", "close", "enqueue", "estimate", "expert_load", "explain", "fork",
    "get_default_sampling_params", "get_metrics", "get_tokenizer", "list_requests", "pin", "plan",
    "pump", "quant_report", "quantize", "rebalance_experts", "reset_prefix_cache", "resize",
    "restore", "set_slo", "set_tenant_weight", "sleep", "snapshot", "stats", "step", "trace",
    "trim", "unpin", "wait_for_completion", "wake_up",
}  # fmt: skip


def public(owner: type, kind: Callable[[Any], bool]) -> set[str]:
    return {name for name, _ in inspect.getmembers(owner, kind) if name[0] != "_"}


def without_tqdm(method: Any) -> list[inspect.Parameter]:
    shown = inspect.signature(method).parameters.values()
    return [one for one in shown if one.name != "use_tqdm"]


def test_every_method_that_waits_for_answers_has_an_async_twin() -> None:
    names = public(LLM, inspect.isfunction)
    twins = {name for name in names if f"a{name}" in names}
    without_text = {"embed", "encode", "classify", "score", "rerank"}
    assert twins == {"generate", "chat", "stream", "run_tools", *without_text}
    for name in twins:
        there = inspect.signature(getattr(LLM, f"a{name}")).parameters.values()
        assert without_tqdm(getattr(LLM, name)) == list(there), name
    rest = names - twins - {f"a{name}" for name in twins}
    assert rest >= NOT_ASYNC
    own = public(AsyncLLM, inspect.iscoroutinefunction)
    assert own == {*without_text, *(f"a{name}" for name in without_text), *(rest - NOT_ASYNC)}
    for name in own & names:
        here, there_too = (inspect.signature(getattr(owner, name)) for owner in (AsyncLLM, LLM))
        assert here == there_too.replace(parameters=without_tqdm(getattr(LLM, name))), name


def plain(output: Any) -> Any:
    """Without request ids, times and tensors."""
    if hasattr(output, "outputs"):
        return output.outputs.data.tolist()
    return getattr(output, "embedding", getattr(output, "score", output))


PROMPTS = [{"prompt_token_ids": [5 + i, 9, 200]} for i in range(3)]
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "embed": ("embed", (PROMPTS,), {}),
    "long texts": ("embed", (["many words " * 2000] * 3,), {"truncate_prompt_tokens": 20}),
    "encode": ("encode", (PROMPTS,), {"pooling": "mean", "normalize": False}),
    "score": ("score", (PROMPTS[0], PROMPTS), {}),
    "rerank": ("rerank", ("one text", ["one", "another text", "one text"], 2), {}),
    "nothing to rank": ("rerank", ("one text", []), {}),
    "beams": ("beam_search", (PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=5)), {}),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_coroutine_returns_what_the_method_returns(tiny: LLM, call: str) -> None:
    name, given, more = CALLS[call]
    expected = getattr(tiny, name)(*given, **more)

    async def twice() -> list[Any]:
        coroutine = getattr(AsyncLLM(tiny), name)
        return await asyncio.gather(coroutine(*given, **more), coroutine(*given, **more))

    for found in asyncio.run(twice()):
        assert type(found) is type(expected)
        if name == "beam_search":
            assert found == expected
        else:
            assert list(map(plain, found)) == list(map(plain, expected))


def test_errors_of_coroutines_are_those_of_the_methods(tiny: LLM) -> None:
    engine, fake = AsyncLLM(tiny), AsyncLLM(FakeLLM())
    beams = BeamSearchParams(beam_width=2, max_tokens=2)
    for coroutine, kind, words in (
        (engine.classify(PROMPTS), RequestError, "no classification head"),
        (engine.encode(PROMPTS, pooling="middle"), RequestError, "pooling: expected one of"),  # type: ignore[arg-type]
        (engine.score(PROMPTS[:2], PROMPTS), RequestError, "expected one text or 3 in data_1"),
        (engine.embed(["x" * 100_000]), RequestError, "max_model_len"),
        (engine.beam_search(PROMPTS, "four"), RequestError, "BeamSearchParams"),  # type: ignore[arg-type]
        (fake.beam_search("x", beams), UnsupportedError, "FakeLLM: beam_search needs a model"),
    ):
        with pytest.raises(kind, match=words):
            asyncio.run(coroutine)


@pytest.mark.parametrize(
    ("name", "more"),
    [("embed", ()), ("beam_search", (BeamSearchParams(beam_width=2, max_tokens=3),))],
)
def test_cancelling_a_coroutine_aborts_its_requests(
    tiny: LLM, name: str, more: tuple[Any, ...]
) -> None:
    gate = Gate()
    held = Caller(lambda: tiny.generate(PROMPT, PARAMS.clone(logits_processors=[gate])))
    gate.wait()
    prompts = [{"prompt_token_ids": [50 + 9 * len(more) + i] * 60} for i in range(2)]
    before = tiny.get_metrics()["num_prompt_tokens"]

    async def cancelled() -> None:
        task = asyncio.ensure_future(getattr(AsyncLLM(tiny), name)(prompts, *more))
        while len(tiny._driver._sinks) < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    gate.open()
    held.get_or_raise()
    settle(tiny)
    assert not tiny._driver._sinks
    # those of the held request, and of one more
    assert tiny.get_metrics()["num_prompt_tokens"] - before <= 4 + 6
