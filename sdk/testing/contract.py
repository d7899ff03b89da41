"""``contract_check``: whether an object behaves like :class:`sdk.LLM`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from sdk.api.errors import EngineClosedError, RequestError
from sdk.api.outputs import RequestOutput
from sdk.api.params import RequestOutputKind, SamplingParams

_PARAMS = SamplingParams(temperature=0, max_tokens=6)
_LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
_PROMPTS = ("the cat", "the dog", "hello")
_CHAT = [{"role": "user", "content": "hello"}]


def contract_check(llm: Any) -> list[str]:
    """Check that ``llm`` behaves like an :class:`sdk.LLM`, then close it.

    Equal prompts must have equal answers: give a ``FakeLLM`` a text, a dict or a function, no
    list. The context must hold 128 tokens. Do not call it inside an event loop. Returns the names
    of the checks.

    :raises AssertionError: it does not; the message says what was expected.
    """
    for check in _CHECKS:
        check(llm)
    return [check.__name__ for check in _CHECKS]


def _expect(holds: bool, what: str, found: object) -> None:
    if not holds:
        raise AssertionError(f"contract: expected {what}, found {found!r:.300}")


def _answer(outputs: Sequence[RequestOutput]) -> tuple[str, list[int]]:
    """Text and tokens of the pieces of one answer, or of a whole answer."""
    parts = [output.outputs[0] for output in outputs if output.outputs]
    return "".join(p.text for p in parts), [token for p in parts for token in p.token_ids]


def outputs_in_the_order_of_prompts(llm: Any) -> None:
    outputs = llm.generate(list(_PROMPTS), _PARAMS, use_tqdm=False)
    prompts = [output.prompt for output in outputs]
    _expect(prompts == list(_PROMPTS), f"outputs for {list(_PROMPTS)} in this order", prompts)
    for output in outputs:
        _expect(output.finished, "a finished output", output)
        _expect(output.outputs[0].finish_reason in ("stop", "length"), "stop or length", output)
        _expect(len(output.outputs[0].token_ids) <= 6, "at most max_tokens=6 tokens", output)
    [alone] = llm.generate(_PROMPTS[1], _PARAMS)
    _expect(_answer([alone]) == _answer([outputs[1]]), "the same answer alone", alone.outputs)


def parameters_for_each_prompt(llm: Any) -> None:
    params = [_LONG.clone(max_tokens=2), _LONG.clone(max_tokens=4)]
    outputs = llm.generate(list(_PROMPTS[:2]), params, use_tqdm=False)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    _expect(lengths == [2, 4], "2 and 4 tokens", lengths)
    [several] = llm.generate(_PROMPTS[0], _PARAMS.clone(n=2))
    indexes = [one.index for one in several.outputs]
    _expect(indexes == [0, 1], "two answers for n=2", several.outputs)


def deltas_add_up(llm: Any) -> None:
    whole = _answer(llm.generate(_PROMPTS[0], _PARAMS))
    pieces = list(llm.stream(_PROMPTS[0], _PARAMS))
    _expect(_answer(pieces) == whole, f"pieces that add up to {whole}", _answer(pieces))
    ends = [piece.finished for piece in pieces]
    _expect(ends == [False] * (len(ends) - 1) + [True], "only the last piece finished", ends)
    final = list(llm.stream(_PROMPTS[0], _PARAMS.clone(output_kind=RequestOutputKind.FINAL_ONLY)))
    _expect([_answer([one]) for one in final] == [whole], "one output for FINAL_ONLY", final)


def chats(llm: Any) -> None:
    whole = _answer(llm.chat(_CHAT, _PARAMS))
    streamed = _answer(list(llm.stream(_CHAT, _PARAMS)))
    _expect(streamed == whole, f"a stream that adds up to {whole}", streamed)
    two = llm.chat([_CHAT, _CHAT], _PARAMS, use_tqdm=False)
    _expect([_answer([one]) for one in two] == [whole, whole], "two equal answers", two)


def async_twins(llm: Any) -> None:
    async def run() -> tuple[Any, Any, list[Any]]:
        both = llm.agenerate(list(_PROMPTS[:2]), _PARAMS), llm.achat(_CHAT, _PARAMS)
        outputs, chat = await asyncio.gather(*both)
        return outputs, chat, [piece async for piece in llm.astream(_PROMPTS[0], _PARAMS)]

    outputs, chat, pieces = asyncio.run(run())
    expected = llm.generate(list(_PROMPTS[:2]), _PARAMS, use_tqdm=False)
    same = [_answer([one]) for one in expected]
    _expect([_answer([one]) for one in outputs] == same, f"agenerate to return {same}", outputs)
    _expect(_answer(pieces) == same[0], f"astream to add up to {same[0]}", pieces)
    _expect(_answer(chat) == _answer(llm.chat(_CHAT, _PARAMS)), "achat to equal chat", chat)


def stepping_by_hand(llm: Any) -> None:
    first, second = llm.enqueue(list(_PROMPTS[:2]), _PARAMS, request_id=["first", "second"])
    _expect((first, second) == ("first", "second"), "the caller's ids", (first, second))
    try:
        llm.enqueue(_PROMPTS[0], _PARAMS, request_id="first")
    except RequestError:
        pass
    else:
        raise AssertionError("contract: expected a RequestError for an id in use, found none")
    done = {}
    while llm.has_unfinished_requests:
        done.update({output.request_id: output for output in llm.step() if output.finished})
    _expect(set(done) == {"first", "second"}, "both requests to finish", done)
    llm.enqueue(_PROMPTS[0], _PARAMS, request_id="pumped")
    pumped = []
    while llm.has_unfinished_requests:
        pumped += llm.pump(5)
    _expect(pumped[-1].finished, "a finished request from pump", pumped)
    llm.enqueue(list(_PROMPTS), _PARAMS)
    waited = [output.prompt for output in llm.wait_for_completion()]
    _expect(waited == list(_PROMPTS), "outputs in the order of enqueueing", waited)
    _expect(llm.wait_for_completion() == [], "each output only once", "another one")


def aborts(llm: Any) -> None:
    llm.enqueue(list(_PROMPTS[:2]), _LONG, request_id=["ended", "kept"])
    llm.step()
    llm.abort(["ended", "unknown"])
    outputs = llm.wait_for_completion()
    reasons = [output.outputs[0].finish_reason for output in outputs]
    _expect(reasons == ["abort", "length"], "one aborted and one complete request", reasons)
    stream = llm.stream(_PROMPTS[0], _LONG)
    next(stream)
    stream.close()  # aborts the request
    llm.generate(_PROMPTS[0], _PARAMS)
    running = llm.get_metrics()["num_running"]
    _expect(running == 0, "no running request after a stream was closed", running)


def errors_before_anything_runs(llm: Any) -> None:
    before = llm.get_metrics()["num_steps"]
    wrong: list[Callable[[], object]] = [
        lambda: llm.generate([_PROMPTS[0], {"prompt_token_ids": []}], _PARAMS),
        lambda: llm.generate(list(_PROMPTS), [_PARAMS]),
        lambda: llm.generate(_PROMPTS[0], priority=2**40),
        lambda: llm.stream({"prompt_token_ids": [-1]}, _PARAMS),
        lambda: llm.chat("no conversation", _PARAMS),
        lambda: llm.enqueue(list(_PROMPTS[:2]), _PARAMS, request_id=["same", "same"]),
        lambda: llm.pump(-1),
    ]
    for call in wrong:
        try:
            found = call()
        except RequestError:
            continue
        raise AssertionError(f"contract: expected a RequestError, found {found!r:.300}")
    after = llm.get_metrics()["num_steps"]
    _expect(after == before, "no step for invalid requests", after - before)
    _expect(llm.generate([]) == [], "no output for no prompt", "outputs")


def embeddings(llm: Any) -> None:
    first, second = llm.embed(list(_PROMPTS[:2]), use_tqdm=False)
    length = math.hypot(*first.embedding)
    _expect(abs(length - 1) < 1e-3, "an embedding of length 1", length)
    _expect(len(first.embedding) == len(second.embedding), "equal sizes", len(second.embedding))
    [same] = llm.score(_PROMPTS[0], _PROMPTS[0])
    _expect(abs(same.score - 1) < 1e-3, "a score of 1 for equal texts", same.score)


def tokenizer(llm: Any) -> None:
    tokens = llm.get_tokenizer()
    ids = tokens.encode(_PROMPTS[0])
    [output] = llm.generate(_PROMPTS[0], _PARAMS)
    _expect(list(output.prompt_token_ids) == ids, f"the prompt as {ids}", output.prompt_token_ids)
    text, generated = _answer([output])
    decoded = tokens.decode(generated, skip_special_tokens=True)
    _expect(decoded == text, f"the text {text!r}", decoded)


def close_is_idempotent(llm: Any) -> None:
    with llm as entered:
        _expect(entered is llm, "the same object from a with statement", entered)
    llm.close()
    for call in (lambda: llm.generate(_PROMPTS[0]), llm.step, llm.get_metrics):
        try:
            call()
        except EngineClosedError:
            continue
        raise AssertionError("contract: expected an EngineClosedError after close, found none")


_CHECKS: tuple[Callable[[Any], None], ...] = (
    outputs_in_the_order_of_prompts,
    parameters_for_each_prompt,
    deltas_add_up,
    chats,
    async_twins,
    stepping_by_hand,
    aborts,
    errors_before_anything_runs,
    embeddings,
    tokenizer,
    close_is_idempotent,
)
