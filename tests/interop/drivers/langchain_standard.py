"""LangChain's standard tests of chat models and embeddings, and a few of our own, with pytest.

``pytest langchain_standard.py`` with the environment variables ``CHAT_MODEL`` and
``EMBEDDING_MODEL``, paths of models.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage, trim_messages
from langchain_core.tools import tool
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from pages import run_section
from pydantic import BaseModel, ValidationError

from sdk import LLM, RequestError
from sdk.integrations.langchain import ChatEmbedLM, EmbedLMEmbeddings, EmbedLMReranker
from sdk.testing import FakeLLM

CHAT = LLM(os.environ["CHAT_MODEL"], max_model_len=2048, max_num_seqs=8)
VECTORS = LLM(os.environ["EMBEDDING_MODEL"])
#: The standard parameters that mean something without a network.
PARAMETERS = {"temperature": 0, "max_tokens": 100, "stop": []}
TOO_SMALL = "a model of 135M parameters does not decide by itself to call a tool"


class TestUnit(ChatModelUnitTests):
    chat_model_class = ChatEmbedLM
    chat_model_params: ClassVar[dict[str, Any]] = {"llm": CHAT}
    standard_chat_model_params = PARAMETERS


class TestChat(ChatModelIntegrationTests):
    chat_model_class = ChatEmbedLM
    chat_model_params: ClassVar[dict[str, Any]] = {"llm": CHAT}
    standard_chat_model_params = PARAMETERS
    has_tool_choice = True
    supports_model_override = False

    @pytest.mark.xfail(reason=TOO_SMALL, strict=True)
    def test_agent_loop(self, model: Any) -> None:
        super().test_agent_loop(model)


class TestVectors(EmbeddingsIntegrationTests):
    embeddings_class = EmbedLMEmbeddings
    embedding_model_params: ClassVar[dict[str, Any]] = {"llm": VECTORS}


@tool
def weather(city: str, unit: str = "celsius") -> str:
    """The weather in a city."""
    return f"21 degrees {unit} in {city}"


class City(BaseModel):
    name: str
    capital: bool


@pytest.fixture
def scripted() -> Iterator[FakeLLM]:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    with FakeLLM([call, "Sunny, 21 degrees."]) as llm:
        yield llm


def test_an_agent_calls_a_tool_and_answers(scripted: FakeLLM) -> None:
    model = ChatEmbedLM(llm=scripted).bind_tools([weather])
    asked = [HumanMessage("Weather in Rome?")]
    first = model.invoke(asked)
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.invoke([*asked, first, result]).content == "Sunny, 21 degrees."


def test_streams_calls_in_pieces_that_add_up(scripted: FakeLLM) -> None:
    chunks = list(ChatEmbedLM(llm=scripted).bind_tools([weather]).stream("Weather in Rome?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.tool_calls[0]["args"] == {"city": "Rome"}
    assert total.usage_metadata is not None and total.usage_metadata["output_tokens"] > 0
    assert total.response_metadata["finish_reason"] in ("stop", "tool_calls")


def test_a_stream_counts_all_tokens_of_its_answer() -> None:
    model = ChatEmbedLM(llm=CHAT, temperature=0, max_tokens=24)
    total = None
    for chunk in model.stream("Name three rivers."):
        total = chunk if total is None else total + chunk
    whole = model.invoke("Name three rivers.")
    assert isinstance(total, AIMessage) and isinstance(whole, AIMessage)
    assert total.usage_metadata is not None and whole.usage_metadata is not None
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[name] == whole.usage_metadata[name]


def test_an_object_has_no_keys_that_its_schema_does_not_name() -> None:
    model = ChatEmbedLM(llm=CHAT, temperature=0, max_tokens=200)
    schema = {"title": "City", "type": "object", "properties": {"name": {"type": "string"}}}
    found = model.with_structured_output(schema).invoke("Tell me all about Paris.")
    assert set(found) <= {"name"}


def test_answers_are_values_of_a_schema() -> None:
    model = ChatEmbedLM(llm=CHAT, temperature=0, max_tokens=64)
    for method in ("json_schema", "function_calling"):
        city = model.with_structured_output(City, method=method).invoke("Tell me about Paris.")
        assert isinstance(city, City)
    raw = model.with_structured_output(City, include_raw=True).invoke("Tell me about Paris.")
    assert isinstance(raw["raw"], AIMessage) and raw["parsing_error"] is None
    with pytest.raises(RequestError, match="shortest answer has"):
        ChatEmbedLM(llm=CHAT, max_tokens=2).with_structured_output(City).invoke("Paris?")


def test_chains_in_threads_and_tasks_share_steps() -> None:
    model = ChatEmbedLM(llm=CHAT, temperature=0, max_tokens=24)
    questions = [f"Name a city in country {number}." for number in range(8)]
    alone = [model.invoke(one).content for one in questions]
    before = CHAT.get_metrics()["num_steps"]
    assert [one.content for one in model.batch(questions)] == alone
    together = CHAT.get_metrics()["num_steps"] - before
    assert together < 8 * 24 / 2

    async def tasks() -> list[str]:
        return [str(one.content) for one in await model.abatch(questions)]

    assert asyncio.run(tasks()) == alone


def test_tokens_are_counted_with_the_model_s_own_tokenizer() -> None:
    model = ChatEmbedLM(llm=CHAT, temperature=0, max_tokens=4)
    asked = [HumanMessage("Name three rivers.")]
    assert model.get_num_tokens("three rivers") == len(CHAT.get_tokenizer().encode("three rivers"))
    for tools in ([], [weather]):
        used = model.bind_tools(tools, tool_choice="none").invoke(asked).usage_metadata
        assert used is not None
        assert model.get_num_tokens_from_messages(asked, tools) == used["input_tokens"]
    long = [HumanMessage("rivers " * 3000)]
    assert model.get_num_tokens_from_messages(long) > 3000
    history = [HumanMessage("old " * 100), AIMessage("yes"), *asked]
    kept = trim_messages(history, max_tokens=60, token_counter=model, strategy="last")
    assert kept[-1] == asked[0] and len(kept) < 3


def test_log_probabilities_are_in_the_metadata() -> None:
    model = ChatEmbedLM(llm=CHAT, temperature=0, max_tokens=3)
    whole = model.invoke("Hi", logprobs=2).response_metadata["logprobs"]["content"]
    assert len(whole) == 3 and [len(one["top_logprobs"]) for one in whole] == [2, 2, 2]
    assert all(one["logprob"] == one["top_logprobs"][0]["logprob"] for one in whole)
    total: Any = None
    for chunk in model.stream("Hi", logprobs=2):
        total = chunk if total is None else total + chunk
    assert total.response_metadata["logprobs"]["content"] == whole
    assert "logprobs" not in model.invoke("Hi").response_metadata


def test_wrong_options_are_named() -> None:
    with pytest.raises(RequestError, match="messages: expected at least one, found none"):
        ChatEmbedLM(llm=CHAT).invoke([])
    with pytest.raises(RequestError, match="n: a stream has one answer, found 2"):
        list(ChatEmbedLM(llm=CHAT, n=2).stream("x"))
    for wrong in (ChatEmbedLM, EmbedLMEmbeddings, EmbedLMReranker):
        with pytest.raises(TypeError, match=r"expected an open sdk\.LLM, found 'model\.gguf'"):
            wrong(llm="model.gguf")
    with pytest.raises(ValidationError, match="either llm=LLM"):
        ChatEmbedLM()
    with pytest.raises(ValidationError, match="temprature"):
        ChatEmbedLM(llm=CHAT, temprature=1)
    with pytest.raises(TypeError, match="frequency"):
        ChatEmbedLM(llm=CHAT, sampling={"frequency": 1}).invoke("x")
    with pytest.raises(RequestError, match="lora"):
        ChatEmbedLM(llm=CHAT).invoke("x", model="no-such-adapter")


def test_documents_are_ranked() -> None:
    documents = [
        Document("The capital of France is Paris.", metadata={"page": 1}),
        Document("Bananas are yellow."),
    ]
    reranker = EmbedLMReranker(llm=VECTORS, top_n=1)
    [best] = reranker.compress_documents(documents, "What is the capital of France?")
    assert best.page_content == documents[0].page_content
    assert best.metadata["page"] == 1 and 0 < best.metadata["relevance_score"] <= 1
    assert documents[0].metadata == {"page": 1}
    assert reranker.compress_documents([], "x") == []


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_section("## LangChain", 2, tmp_path, monkeypatch)
