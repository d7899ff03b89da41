"""Programs for clients of OpenAI's API, unmodified, against a server: prints what each found.

``python openai_clients.py BASE_URL MODEL [PROGRAM ...]``. Not all libraries can live together.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

import openai
from pydantic import BaseModel

BASE, MODEL, *NAMED = sys.argv[1:]
KEY = "none"
ASK: Any = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
EXACT: Any = {"temperature": 0, "max_tokens": 24}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    capital: bool


def sync() -> Any:
    found = client.chat.completions.create(model=MODEL, messages=ASK, **EXACT)
    assert found.usage is not None
    return found.choices[0].message.content, found.usage.completion_tokens


def stream() -> Any:
    options: Any = {"include_usage": True}
    pieces = client.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, stream_options=options, **EXACT
    )
    text, usage = "", 0
    for chunk in pieces:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage.completion_tokens if chunk.usage else usage
    return text, usage


def asynchronous() -> Any:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=BASE, api_key=KEY) as one:
            create = one.chat.completions.create
            both = (create(model=MODEL, messages=ASK, n=n, **EXACT) for n in (1, 2))
            first, second = await asyncio.gather(*both)
            pieces = await create(model=MODEL, messages=ASK, stream=True, **EXACT)
            text = "".join([c.choices[0].delta.content or "" async for c in pieces])
            return first.choices[0].message.content, len(second.choices), text

    return asyncio.run(ask())


def tools() -> Any:
    found = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=60
    )
    assert found.choices[0].finish_reason == "tool_calls"
    [call] = found.choices[0].message.tool_calls or []
    answer: Any = found.choices[0].message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    last = client.chat.completions.create(
        model=MODEL, messages=[*ASK, answer, result], tools=[TOOL], tool_choice="none", **EXACT
    )
    return call.function.name, json.loads(call.function.arguments), bool(last.choices)


def streamed_tools() -> Any:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=60
    ) as events:
        for _ in events:
            pass
        [call] = events.get_final_completion().choices[0].message.tool_calls or []
    return call.function.name, json.loads(call.function.arguments)


def parse() -> Any:
    found = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, max_tokens=60
    )
    parsed = found.choices[0].message.parsed
    assert parsed is not None
    return parsed.model_dump()


def logprobs() -> Any:
    found = client.chat.completions.create(
        model=MODEL, messages=ASK, logprobs=True, top_logprobs=3, temperature=0, max_tokens=4
    )
    content = found.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    return len(content), [len(one.top_logprobs) for one in content]


def completions() -> Any:
    found = client.completions.create(
        model=MODEL, prompt=["One, two,", "a b c"], echo=True, logprobs=1, **EXACT
    )
    return [choice.text[:6] for choice in found.choices]


def responses() -> Any:
    found = client.responses.create(
        model=MODEL, input="Name a river.", instructions="Be brief.", max_output_tokens=16
    )
    text = whole = ""
    with client.responses.stream(
        model=MODEL, input="Name a river.", temperature=0, max_output_tokens=16
    ) as events:
        for event in events:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                whole = event.response.output_text
    more = client.responses.create(
        model=MODEL, input="Another one?", previous_response_id=found.id, max_output_tokens=8
    )
    assert more.usage is not None and found.usage is not None
    assert more.usage.input_tokens > found.usage.total_tokens
    assert client.responses.retrieve(more.id).output_text == more.output_text
    client.responses.delete(found.id)
    try:
        client.responses.retrieve(found.id)
        raise AssertionError("it is still there")
    except openai.NotFoundError:
        pass
    parsed = client.responses.parse(model=MODEL, input="A city.", text_format=City)
    assert parsed.output_parsed is not None
    return bool(found.output_text), text == whole != "", parsed.output_parsed.model_dump()


def embeddings() -> Any:
    found = client.embeddings.create(model=MODEL, input=["a", "b"])
    return len(found.data), round(sum(x * x for x in found.data[0].embedding), 3)


def errors() -> Any:
    kinds = []
    for call in (
        lambda: client.models.retrieve("other"),
        lambda: client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1),
        lambda: client.chat.completions.create(model=MODEL, messages=[]),
    ):
        try:
            call()
        except openai.APIStatusError as error:
            kinds.append((type(error).__name__, error.param))
    return kinds, [model.id for model in client.models.list()]


def with_litellm() -> Any:
    import litellm

    how: Any = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "messages": ASK}
    whole = litellm.completion(**how, **EXACT).choices[0].message.content
    pieces = litellm.completion(**how, **EXACT, stream=True)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    called = litellm.completion(**how, tools=[TOOL], tool_choice="required", max_tokens=60)
    [call] = called.choices[0].message.tool_calls
    long = [{"role": "user", "content": "word " * 20000}]
    try:
        litellm.completion(**{**how, "messages": long})
    except litellm.ContextWindowExceededError:
        return whole == text != "", call.function.name, "too long"
    return whole == text != "", call.function.name, None


def with_langchain() -> Any:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI as LangchainOpenAI, OpenAIEmbeddings

    settings: Any = {"model": MODEL, "base_url": BASE, "api_key": KEY, "temperature": 0}
    chat = ChatOpenAI(**settings, max_tokens=24)
    whole = chat.invoke("What is the capital of France?").content
    text = "".join(str(piece.content) for piece in chat.stream("What is the capital of France?"))

    @tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        return "sunny"

    longer = ChatOpenAI(**settings, max_tokens=80)
    [call] = longer.bind_tools([weather], tool_choice="any").invoke("Weather?").tool_calls
    city: Any = longer.with_structured_output(City, method="json_schema").invoke("A city.")
    raw = LangchainOpenAI(**settings, max_tokens=4).invoke("One, two,")
    vectors = OpenAIEmbeddings(
        model=MODEL, base_url=BASE, api_key=KEY, check_embedding_ctx_length=False
    ).embed_documents(["a", "b"])
    return whole == text != "", call["name"], city.model_dump(), bool(raw), len(vectors)


def with_instructor() -> Any:
    import instructor

    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        wrapped = instructor.from_openai(client, mode=mode)
        city = wrapped.chat.completions.create(
            model=MODEL, messages=ASK, response_model=City, max_tokens=80, max_retries=0
        )
        found.append(city.model_dump())
    return found


PROGRAMS: tuple[Callable[[], Any], ...] = (
    *(sync, stream, asynchronous, tools, streamed_tools, parse, logprobs, completions, responses),
    *(embeddings, errors, with_litellm, with_langchain, with_instructor),
)


def main() -> None:
    found = {}
    for program in PROGRAMS:
        if NAMED and program.__name__ not in NAMED:
            continue
        try:
            found[program.__name__] = {"found": program()}
        except Exception:
            found[program.__name__] = {"error": traceback.format_exc()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
