"""The openai-like client: its arguments reach the LLM, responses and errors are openai's."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from sdk import EngineDeadError, RequestError, SamplingParams
from sdk.api.errors import OutOfMemoryError, SdkError
from sdk.compat.openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    BadRequestError,
    InternalServerError,
    OpenAI,
    OpenAIError,
)
from sdk.testing import FakeAnswer, FakeLLM, ManualClock

PAGE = (Path(__file__).parents[2] / "docs" / "serving" / "openai.md").read_text(encoding="utf-8")
ASK = [{"role": "user", "content": "How are you?"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


def test_the_examples_of_the_page_run() -> None:
    examples = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(examples) == 3
    names: dict[str, Any] = {"__name__": "docs"}
    for example in examples:
        exec(compile(example, "docs/serving/openai.md", "exec"), names)


def test_a_chat_completion_has_the_shape_of_openai_s(fake_llm: Any) -> None:
    client = OpenAI(fake_llm("Fine, thanks."), model="tiny")
    found = client.chat.completions.create(messages=ASK)
    dumped = found.model_dump()
    assert dumped["id"].startswith("chatcmpl-") and dumped["created"] > 0
    assert (dumped["object"], dumped["model"]) == ("chat.completion", "tiny")
    [choice] = dumped["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "content": "Fine, thanks.",
            "role": "assistant",
            "tool_calls": None,
            "refusal": None,
            "reasoning_content": None,
        },
        "finish_reason": "stop",
        "logprobs": None,
        "closed": None,
    }
    usage = dumped["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == 5
    assert json.loads(found.model_dump_json()) == dumped
    assert "tool_calls" not in found.to_dict()["choices"][0]["message"]
    assert json.loads(found.to_json()) == found.to_dict()
    assert client.chat.completions.create(messages=ASK, model="other").model == "other"


def test_arguments_reach_the_sampling_parameters(fake_llm: Any) -> None:
    llm = fake_llm(default_sampling_params=SamplingParams(top_k=7, temperature=0.3))
    client = OpenAI(llm)
    client.chat.completions.create(
        messages=ASK,
        top_p=0.5,
        n=2,
        stop=["x"],
        seed=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        max_completion_tokens=9,
        logit_bias={"5": -100},
        timeout=30,
        temperature=None,
        user="me",
        extra_headers={"a": "b"},
        extra_body={"min_p": 0.1},
    )
    params = llm.requests[0].sampling_params
    assert (params.top_k, params.temperature) == (7, 0.3)
    assert (params.top_p, params.n, params.stop, params.seed) == (0.5, 2, ("x",), 3)
    assert (params.presence_penalty, params.frequency_penalty) == (0.1, 0.2)
    assert (params.max_tokens, params.deadline, params.min_p) == (9, 30, 0.1)
    assert dict(params.logit_bias) == {5: -100}


def test_unknown_and_unsupported_arguments_are_errors(fake_llm: Any) -> None:
    llm = fake_llm("x")
    client = OpenAI(llm)
    with pytest.raises(TypeError, match="unexpected keyword argument 'functions'"):
        client.chat.completions.create(messages=ASK, functions=[])
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"response_format": {"type": "xml"}}, "response_format: expected a dict with the type"),
        ({"response_format": {"type": "json_schema"}}, "response_format: expected {'type'"),
        ({"top_logprobs": 2}, "top_logprobs: needs logprobs=true"),
        ({"reasoning_effort": 3}, "reasoning_effort: expected a non-empty string"),
        ({"extra_body": 3}, "extra_body: expected a dict, found 3"),
        ({"extra_body": {"top_q": 1}}, "top_q"),
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": "auto"}, "tool_choice: expected tools too"),
    ]
    for arguments, message in wrong:
        with pytest.raises(BadRequestError, match=message) as raised:
            client.chat.completions.create(messages=ASK, **arguments)
        assert raised.value.status_code == 400
    for messages in ([], [ASK], "hello", None):
        with pytest.raises(BadRequestError, match="messages: expected a list of messages"):
            client.chat.completions.create(messages=messages)
    for arguments in ({"echo": 1}, {"suffix": "x", "echo": True}, {"logprobs": -3}):
        with pytest.raises(BadRequestError, match=next(iter(arguments))):
            client.completions.create(prompt="x", **arguments)
    with pytest.raises(BadRequestError, match="expected one prompt with stream=True, found 2"):
        client.completions.create(prompt=["a", "b"], stream=True)
    with pytest.raises(BadRequestError, match="encoding_format: expected 'float'"):
        client.embeddings.create(input="x", encoding_format="base64")
    with pytest.raises(BadRequestError, match="dimensions: is not supported"):
        client.embeddings.create(input="x", dimensions=4)
    assert llm.requests == []


def test_arguments_that_openai_marks_as_left_out_are_not_given(fake_llm: Any) -> None:
    """Frameworks pass every argument they know, those of later releases too, with openai's mark."""

    class Omit:
        __module__ = "openai"

        def __bool__(self) -> bool:
            return False

    omit: Any = Omit()
    client = OpenAI(fake_llm("hello"))
    given = {"temperature": omit, "moderation": omit, "stream": omit, "model": omit}
    assert client.chat.completions.create(messages=ASK, **given).choices[0].message.content
    client.embeddings.create(input="x", encoding_format=omit, dimensions=omit)
    with pytest.raises(TypeError, match="moderation"):
        client.chat.completions.create(messages=ASK, moderation="auto")


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(fake_llm: Any) -> None:
    client = OpenAI(fake_llm("one two three"))
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=ASK, stream=True, stream_options=usage))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    *body, last = chunks
    assert [chunk.choices[0].delta.role for chunk in body] == ["assistant", None, None, None]
    assert "".join(chunk.choices[0].delta.content for chunk in body) == "one two three"
    assert [chunk.choices[0].finish_reason for chunk in body] == [None, None, None, "stop"]
    assert last.choices == [] and last.usage.completion_tokens == 4
    assert last.usage.total_tokens == last.usage.prompt_tokens + 4
    assert all(chunk.usage is None for chunk in body)


def test_closing_a_stream_aborts_its_request(fake_llm: Any) -> None:
    llm = fake_llm("word " * 50, seconds_per_token=0.001)
    with OpenAI(llm).chat.completions.create(messages=ASK, stream=True) as stream:
        next(stream)
    llm.generate("x", SamplingParams(max_tokens=1))
    assert llm.get_metrics()["num_running"] == 0


def test_structures_and_logprobs(fake_llm: Any) -> None:
    llm = fake_llm('{"a": 1}')
    create = OpenAI(llm).chat.completions.create
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    found = create(messages=ASK, response_format=wanted, logprobs=True, top_logprobs=1)
    entries = found.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries[:-1]) == '{"a": 1}'
    assert entries[0].bytes == [ord("{")] and entries[0].top_logprobs[0].logprob == 0
    create(messages=ASK, response_format={"type": "json_object"})
    create(messages=ASK, response_format={"type": "text"})
    structures = [request.sampling_params.structure for request in llm.requests]
    assert structures[0].json == SCHEMA and structures[1].json_object and structures[2] is None


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(fake_llm: Any, stream: bool) -> None:
    call = FakeAnswer("Wait.", tool_calls=[("now", {"zone": "UTC"}), ("now", {})])
    create = OpenAI(fake_llm(call)).chat.completions.create
    found = create(messages=ASK, tools=[TOOL], tool_choice="auto", stream=stream)
    if not stream:
        [choice] = found.choices
        assert choice.message.content.strip() == "Wait."
        calls = [(one.function.name, one.function.arguments) for one in choice.message.tool_calls]
        assert choice.finish_reason == "tool_calls"
        assert {one.type for one in choice.message.tool_calls} == {"function"}
    else:
        names: dict[int, str] = {}
        arguments: dict[int, str] = {}
        chunks = list(found)
        for chunk in chunks:
            for one in chunk.choices[0].delta.tool_calls or []:
                names[one.index] = one.function.name or names[one.index]
                arguments[one.index] = arguments.get(one.index, "") + one.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        calls = [(names[index], arguments[index]) for index in sorted(names)]
    assert calls == [("now", '{"zone": "UTC"}'), ("now", "{}")]


def test_completions_and_embeddings(fake_llm: Any) -> None:
    client = OpenAI(fake_llm(lambda prompt: f"to {prompt}"))
    found = client.completions.create(prompt=["a", "b"], max_tokens=5)
    assert [choice.text for choice in found.choices] == ["to a", "to b"]
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.object == "text_completion" and found.usage.prompt_tokens == 2
    options = {"include_usage": True}
    pieces = list(client.completions.create(prompt="a", stream=True, stream_options=options))
    assert "".join(c.text for piece in pieces for c in piece.choices) == "to a"
    assert pieces[-1].usage.completion_tokens == 3
    vectors = client.embeddings.create(input=["a b", "c"])
    assert [one.index for one in vectors.data] == [0, 1]
    assert len(vectors.data[0].embedding) == 32
    assert (vectors.object, vectors.usage.total_tokens) == ("list", 3)


def test_errors_are_openai_s_and_keep_their_cause(fake_llm: Any) -> None:
    def create(error: Exception | FakeAnswer, **options: Any) -> Any:
        return OpenAI(fake_llm(error, **options)).chat.completions.create(messages=ASK, timeout=5)

    with pytest.raises(BadRequestError, match="too long") as bad:
        create(RequestError("too long"))
    assert isinstance(bad.value.__cause__, RequestError)
    assert bad.value.body["type"] == "invalid_request_error"
    with pytest.raises(InternalServerError):
        create(OutOfMemoryError("no memory"))
    with pytest.raises(InternalServerError, match="NaN") as failed:
        create(FakeAnswer("x", error=ValueError("NaN")))
    assert failed.value.status_code == 500
    with pytest.raises(APIConnectionError, match="rank 1"):
        create(FakeAnswer("x", error=EngineDeadError("rank 1")))
    clock = ManualClock()
    with pytest.raises(APITimeoutError):
        create(FakeAnswer("a b c"), seconds_per_token=4, clock=clock, sleep=clock.sleep)
    closed = fake_llm("x")
    closed.close()
    with pytest.raises(APIConnectionError, match="closed"):
        OpenAI(closed).chat.completions.create(messages=ASK)
    for kind in (BadRequestError, InternalServerError):
        assert issubclass(kind, APIStatusError)
    assert issubclass(APITimeoutError, APIError) and issubclass(APIError, OpenAIError)
    assert issubclass(OpenAIError, SdkError)


def test_errors_in_the_middle_of_a_stream(fake_llm: Any) -> None:
    client = OpenAI(fake_llm(FakeAnswer("a b", error=ValueError("NaN"))))
    pieces = []
    with pytest.raises(InternalServerError, match="NaN"):
        for chunk in client.chat.completions.create(messages=ASK, stream=True):
            pieces.append(chunk.choices[0].delta.content)
    assert pieces == ["a", " b"]


def test_an_aborted_request_is_an_api_error(fake_llm: Any) -> None:
    llm = fake_llm("word " * 50, seconds_per_token=0.001)
    stream = OpenAI(llm).chat.completions.create(messages=ASK, stream=True)
    next(stream)
    llm.abort("#0")
    with pytest.raises(APIError, match="aborted"):
        list(stream)


def test_the_async_client_does_the_same(fake_llm: Any) -> None:
    llm = fake_llm("one two")

    async def run() -> None:
        async with AsyncOpenAI(llm, model="tiny") as client:
            create = client.chat.completions.create
            whole, text = await asyncio.gather(
                create(messages=ASK), client.completions.create(prompt="x")
            )
            assert whole.choices[0].message.content == text.choices[0].text == "one two"
            stream = await create(messages=ASK, stream=True)
            assert "".join([c.choices[0].delta.content async for c in stream]) == "one two"
            async with await client.completions.create(prompt="x", stream=True) as pieces:
                assert (await pieces.__anext__()).choices[0].text == "one"
            vectors = await client.embeddings.create(input="a")
            assert len(vectors.data) == 1
            with pytest.raises(BadRequestError):
                await create(messages=[])
        await client.close()

    asyncio.run(run())


def test_a_real_engine_answers_through_the_client(tiny_llm: Any) -> None:
    llm = tiny_llm(max_model_len=512, num_threads=1)
    create = OpenAI(llm).chat.completions.create
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    found = create(messages=ASK, response_format=wanted, max_tokens=40, temperature=0)
    assert set(json.loads(found.choices[0].message.content)) >= {"a"}
    plain = create(messages=ASK, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2)
    pieces = create(messages=ASK, max_tokens=6, temperature=0, stream=True)
    text = "".join(piece.choices[0].delta.content for piece in pieces)
    assert text == plain.choices[0].message.content
    assert len(plain.choices[0].logprobs.content) == plain.usage.completion_tokens
    called = create(
        messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=80, temperature=0
    )
    assert called.choices[0].message.tool_calls[0].function.name == "now"


def test_a_fake_engine_is_closed_by_its_owner() -> None:
    llm = FakeLLM("x")
    with OpenAI(llm) as client:
        pass
    assert client.completions.create(prompt="a").choices[0].text == "x"
    llm.close()
