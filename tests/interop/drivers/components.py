"""Classes of LlamaIndex and Haystack on models in this process, with pytest.

``pytest components.py`` with the environment variables ``CHAT_MODEL``, ``EMBEDDING_MODEL`` and
``PAGE``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.core.errors import SerializationError
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import create_tool_from_function
from llama_index.core import Document as IndexDocument, VectorStoreIndex
from llama_index.core.llms import ChatMessage as IndexMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from pages import run_section
from pydantic import BaseModel

from sdk import LLM
from sdk.integrations.haystack import (
    EmbedLMDocumentEmbedder,
    EmbedLMRanker,
    EmbedLMTextEmbedder,
    chat_generator,
)
from sdk.integrations.llamaindex import EmbedLMEmbedding, EmbedLMRerank, chat_model
from sdk.testing import FakeAnswer, FakeLLM

TEXTS = ["Bees make honey.", "Paris is the capital of France.", "Glaciers are made of ice."]


class City(BaseModel):
    name: str
    capital: bool


@pytest.fixture(scope="module")
def vectors() -> Iterator[LLM]:
    with LLM(os.environ["EMBEDDING_MODEL"]) as opened:
        yield opened


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(os.environ["CHAT_MODEL"], max_model_len=1024) as opened:
        yield opened


def weather(city: str) -> str:
    """The weather in a city."""
    return f"Sunny in {city}"


def test_an_index_of_llamaindex_finds_and_reranks(vectors: LLM) -> None:
    embedding = EmbedLMEmbedding(llm=vectors)
    index = VectorStoreIndex.from_documents(
        [IndexDocument(text=text) for text in TEXTS], embed_model=embedding
    )
    found = index.as_retriever(similarity_top_k=3).retrieve("Which city is in France?")
    assert found[0].text == TEXTS[1] and len(found) == 3
    asyncio.run(index.as_retriever().aretrieve("ice"))
    best = EmbedLMRerank(llm=vectors, top_n=1).postprocess_nodes(found, query_str="What is ice?")
    assert [one.text for one in best] == [TEXTS[2]] and 0 < best[0].score <= 1
    [same] = asyncio.run(
        EmbedLMRerank(llm=vectors, top_n=1).apostprocess_nodes(found, query_str="What is ice?")
    )
    assert same.score == best[0].score
    assert EmbedLMRerank(llm=vectors).postprocess_nodes([], query_str="x") == []
    nodes = [NodeWithScore(node=TextNode(text="x"))]
    with pytest.raises(ValueError, match="expected a query"):
        EmbedLMRerank(llm=vectors).postprocess_nodes(nodes)


def test_vectors_of_llamaindex_are_those_of_the_model(vectors: LLM) -> None:
    embedding = EmbedLMEmbedding(llm=vectors)
    [expected] = vectors.embed(TEXTS[0])
    assert embedding.get_text_embedding(TEXTS[0]) == expected.embedding
    batch = embedding.get_text_embedding_batch(TEXTS)
    assert batch == [one.embedding for one in vectors.embed(TEXTS)]
    assert asyncio.run(embedding.aget_query_embedding(TEXTS[0])) == expected.embedding


def test_llamaindex_chats_streams_and_calls_tools(llm: LLM) -> None:
    call = FakeAnswer(tool_calls=[("weather", {"city": "Rome"})])
    with FakeLLM([call, "The Rhine flows north."]) as fake:
        model = chat_model(fake)
        reply = model.chat_with_tools([FunctionTool.from_defaults(weather)], "Weather in Rome?")
        [found] = model.get_tool_calls_from_response(reply)
        assert (found.tool_name, found.tool_kwargs) == ("weather", {"city": "Rome"})
        pieces = [one.delta for one in model.stream_chat([IndexMessage("A river?")])]
        assert len(pieces) > 3 and "".join(map(str, pieces)) == "The Rhine flows north."
    model = chat_model(llm, temperature=0, max_tokens=100)
    typed = model.as_structured_llm(City).complete("Which city has the Eiffel Tower?")
    assert isinstance(typed.raw, City)
    assert asyncio.run(model.acomplete("Name a river.")).text
    assert model.metadata.context_window == 1024


def test_a_pipeline_of_haystack_embeds_retrieves_and_ranks(vectors: LLM) -> None:
    documents = [Document(content=text, meta={"page": n}) for n, text in enumerate(TEXTS)]
    embedded = EmbedLMDocumentEmbedder(vectors).run(documents)["documents"]
    assert documents[0].embedding is None and len(embedded[0].embedding) == 384
    store = InMemoryDocumentStore()
    store.write_documents(embedded)
    pipeline = Pipeline()
    pipeline.add_component("query", EmbedLMTextEmbedder(vectors))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=3))
    pipeline.add_component("ranker", EmbedLMRanker(vectors, top_k=1))
    pipeline.connect("query.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")
    asked = {"query": {"text": "Who makes honey?"}, "ranker": {"query": "Who makes honey?"}}
    [best] = pipeline.run(asked)["ranker"]["documents"]
    assert best.content == TEXTS[0] and best.meta == {"page": 0} and 0 < best.score <= 1

    async def same() -> None:
        ranked = await EmbedLMRanker(vectors, top_k=1).run_async("Who makes honey?", documents)
        assert ranked["documents"][0].content == TEXTS[0]
        again = await EmbedLMDocumentEmbedder(vectors).run_async(documents)
        assert [one.embedding for one in again["documents"]] == [one.embedding for one in embedded]
        query = await EmbedLMTextEmbedder(vectors).run_async(TEXTS[0])
        assert query["embedding"] == embedded[0].embedding

    asyncio.run(same())
    assert EmbedLMRanker(vectors).run("x", []) == {"documents": []}
    named = EmbedLMDocumentEmbedder(vectors, meta_fields_to_embed=["page", "none"])
    [other] = named.run(documents[:1])["documents"]
    [expected] = vectors.embed(f"0\n{TEXTS[0]}")
    assert other.embedding == expected.embedding


def test_haystack_generates_streams_and_calls_tools() -> None:
    call = FakeAnswer(tool_calls=[("weather", {"city": "Rome"})])
    with FakeLLM([call, "The Rhine flows north.", "Yes."]) as fake:
        generator = chat_generator(fake, tools=[create_tool_from_function(weather)])
        [reply] = generator.run([ChatMessage.from_user("Weather in Rome?")])["replies"]
        assert reply.tool_call.arguments == {"city": "Rome"}
        pieces: list[StreamingChunk] = []
        generator.run([ChatMessage.from_user("A river?")], streaming_callback=pieces.append)
        assert "".join(one.content for one in pieces) == "The Rhine flows north."
        found = asyncio.run(generator.run_async([ChatMessage.from_user("A river?")]))
        assert found["replies"][0].text == "Yes."


def test_an_answer_that_is_left_in_the_middle_ends() -> None:
    story = "It was a dark and stormy night. " * 50

    def raises(_: StreamingChunk) -> None:
        raise RuntimeError("the window is gone")

    with FakeLLM(story, seconds_per_token=0.01) as fake:
        pieces = chat_model(fake).stream_chat([IndexMessage("A story.")])
        next(pieces)
        pieces.close()
        ended(fake)
        with pytest.raises(RuntimeError, match="the window is gone"):
            chat_generator(fake, streaming_callback=raises).run([ChatMessage.from_user("Go on.")])
        ended(fake)


def ended(fake: FakeLLM) -> None:
    """Its requests end before their answers would."""
    deadline = time.monotonic() + 2
    while fake.get_metrics()["num_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_wrong_models_and_limits_are_named(vectors: LLM) -> None:
    path: Any = "model.gguf"
    for make in (chat_model, chat_generator, EmbedLMTextEmbedder, EmbedLMRanker):
        with pytest.raises(TypeError, match=r"expected an open sdk\.LLM, found 'model\.gguf'"):
            make(path)
    for kind in (EmbedLMEmbedding, EmbedLMRerank):
        with pytest.raises(TypeError, match=r"expected an open sdk\.LLM, found 'model\.gguf'"):
            kind(llm=path)
    with pytest.raises(ValueError, match="top_k: expected an integer of at least 1, found 0"):
        EmbedLMRanker(vectors, top_k=0)
    with pytest.raises(ValueError, match="top_k: expected an integer of at least 1, found -1"):
        EmbedLMRanker(vectors).run("x", [Document(content="x")], top_k=-1)
    pipeline = Pipeline()
    pipeline.add_component("query", EmbedLMTextEmbedder(vectors))
    with pytest.raises(SerializationError, match="EmbedLMTextEmbedder: holds an open model"):
        pipeline.dumps()
    assert EmbedLMEmbedding(llm=vectors).model_name == Path(os.environ["EMBEDDING_MODEL"]).name


@pytest.mark.parametrize(("title", "blocks"), [("## LlamaIndex", 1), ("## Haystack", 1)])
def test_the_page_runs(
    title: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_section(title, blocks, tmp_path, monkeypatch)
