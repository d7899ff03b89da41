"""Answers that were completed because few tokens were left say so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.serving.openai.completions import CompletionResponses
from sdk.serving.openai.requests import CompletionRequest, StreamOptions
from sdk.serving.openai.responses import Responses

LONG = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def answer(llm: LLM, tokens: int, **more: Any) -> CompletionOutput:
    params = SamplingParams(max_tokens=tokens, **{"temperature": 0, **more})
    return llm.generate("the cat", params, use_tqdm=False)[0].outputs[0]


@pytest.mark.parametrize(
    "structure",
    [
        {"json": {**LONG, "additionalProperties": False}},  # a string goes on
        {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
        {"regex": "[a-z ]{8,}"},  # complete after each character
        {"json": {"type": "string", "minLength": 20}},
    ],
)
def test_an_answer_that_was_cut_short_is_closed(tiny: LLM, structure: dict[str, Any]) -> None:
    more = {"structured_outputs": structure, "temperature": 3.0, "seed": 3}
    found = answer(tiny, 26, **more, logit_bias={tiny.get_tokenizer().eos_token_id: -100})
    assert found.finish_reason == "stop" and found.closed
    assert len(found.token_ids) <= 26
    streamed = [
        one.outputs[0]
        for one in tiny.stream(
            "the cat",
            SamplingParams(
                max_tokens=26, logit_bias={tiny.get_tokenizer().eos_token_id: -100}, **more
            ),
        )
    ]
    assert [one.closed for one in streamed] == [False] * (len(streamed) - 1) + [True]


@pytest.mark.parametrize("structure", [{"choice": ["yes", "no"]}, {"json": {"const": [1, 2]}}])
def test_an_answer_that_ends_by_itself_is_not(tiny: LLM, structure: dict[str, Any]) -> None:
    found = answer(tiny, 40, structured_outputs=structure)
    assert found.finish_reason == "stop" and not found.closed
    found = answer(tiny, 4)  # no structure
    assert found.finish_reason == "length" and not found.closed


def test_a_token_after_which_nothing_may_follow_does_not_close(tiny: LLM) -> None:
    endless = {"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "integer", "maximum": 9}},
        "additionalProperties": False,
        "$defs": {"x": json.loads(json.dumps(endless).replace('"#"', '"#/$defs/x"'))},
    }
    more = {"structured_outputs": {"json": schema}, "temperature": 5.0}
    found = [answer(tiny, 300, seed=seed, **more) for seed in range(6)]
    assert not any(one.closed for one in found if len(one.token_ids) < 200)


def test_responses_of_a_server_have_the_field_only_where_it_says_something(
    tiny: LLM,
) -> None:
    for closed in (False, True):
        one = CompletionOutput(0, "{}", [1], finish_reason="stop", closed=closed)
        output = RequestOutput("1", "a", [1], None, [one], True)
        chats = Responses("chatcmpl", "tiny", lambda _: None)
        asked = CompletionRequest(
            params=SamplingParams(), streaming=StreamOptions(), cache_salt=None, prompts=["a"]
        )
        texts = CompletionResponses("tiny", lambda _: None, asked, tiny.get_tokenizer())
        found: Any
        for found in (chats.chat(output), chats.chunk(output), texts.whole([output])):
            choice = found.to_dict()["choices"][0]
            assert choice.get("closed") == (True if closed else None)
            assert ("closed" in choice) is closed
