"""Encoders over HTTP: vectors, scores, classes; what they cannot do is an error that says so."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sdk import LLM
from sdk.serving import create_app
from tests.serving.serving import Client, running
from tests.tiny_encoders import add_modules, build

TEXTS = ["bees make honey .", "the shop opens at nine"]
LONG = "a b c " * 30


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, LLM]]:
    folder = tmp_path_factory.mktemp("embedder")
    build(folder, "BertModel", 2)
    add_modules(folder, prompts={"query": "a b ", "document": ""})
    options: Any = {"num_threads": 1, "hf_overrides": {"is_matryoshka": True}}
    with LLM(folder, **options) as llm, running(create_app(llm, model_name="m")) as client:
        yield client, llm


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, LLM]]:
    folder = tmp_path_factory.mktemp("reranker")
    build(folder, "BertForSequenceClassification", 1)
    with LLM(folder, num_threads=1) as llm, running(create_app(llm, model_name="m")) as client:
        yield client, llm


def test_vectors_have_the_options_of_the_library(embedder: tuple[Client, LLM]) -> None:
    client, llm = embedder
    for options in ({}, {"prompt_name": "query"}, {"prompt": "c "}, {"dimensions": 8}):
        found = client.post("/v1/embeddings", {"input": TEXTS, **options}).json
        wanted = llm.embed(TEXTS, **options)
        assert [one["embedding"] for one in found["data"]] == [
            pytest.approx(one.embedding, abs=1e-6) for one in wanted
        ]
        count = sum(len(one.prompt_token_ids) for one in wanted)
        assert found["usage"]["prompt_tokens"] == count
    for dtype, kind in (("int8", np.int8), ("ubinary", np.uint8)):
        asked = {"input": TEXTS[0], "output_dtype": dtype}
        [plain] = client.post("/v1/embeddings", asked).json["data"]
        [wanted] = llm.embed(TEXTS[0], output_dtype=dtype)  # type: ignore[arg-type]
        assert plain["embedding"] == wanted.embedding
        asked["encoding_format"] = "base64"
        [packed] = client.post("/v1/embeddings", asked).json["data"]
        numbers = np.frombuffer(base64.b64decode(packed["embedding"]), kind)
        assert numbers.tolist() == wanted.embedding


def test_long_texts_are_refused_or_cut(embedder: tuple[Client, LLM]) -> None:
    client, llm = embedder
    assert client.post("/v1/embeddings", {"input": LONG}).status == 400
    [wanted] = llm.embed(LONG, truncate_prompt_tokens=-1)
    for options in ({"truncate_prompt_tokens": -1}, {"truncate": True}):
        [found] = client.post("/v1/embeddings", {"input": LONG, **options}).json["data"]
        assert found["embedding"] == pytest.approx(wanted.embedding, abs=1e-6)
    [ollama] = client.post("/api/embed", {"input": LONG}).json["embeddings"]
    assert ollama == pytest.approx(wanted.embedding, abs=1e-6)
    assert client.post("/api/embed", {"input": LONG, "truncate": False}).status == 400
    [short] = client.post("/api/embed", {"input": TEXTS[0], "dimensions": 4}).json["embeddings"]
    assert short == pytest.approx(llm.embed(TEXTS[0], dimensions=4)[0].embedding, abs=1e-6)
    both = {"input": "a", "truncate": True, "truncate_prompt_tokens": 3}
    found = client.post("/v1/embeddings", both)
    assert found.status == 400 and "expected one of the two" in found.error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted(path: str, reranker: tuple[Client, LLM]) -> None:
    client, llm = reranker
    asked = {"query": "the shop", "documents": [*TEXTS, LONG], "truncate": True}
    found = client.post(path, asked).json["results"]
    wanted = llm.rerank("the shop", [*TEXTS, LONG], truncate_prompt_tokens=-1)
    assert [(one["index"], one["relevance_score"]) for one in found] == [
        (one.index, pytest.approx(one.relevance_score)) for one in wanted
    ]
    assert client.post(path, {"query": "the shop", "documents": [LONG]}).status == 400


def test_scores_and_classes(reranker: tuple[Client, LLM]) -> None:
    client, llm = reranker
    for path in ("/score", "/v1/score"):
        found = client.post(path, {"text_1": "the shop", "text_2": TEXTS}).json["data"]
        wanted = [one.score for one in llm.score("the shop", TEXTS)]
        assert [one["score"] for one in found] == pytest.approx(wanted)
    found = client.post("/classify", {"input": TEXTS}).json["data"]
    assert [one["probs"] for one in found] == [
        pytest.approx(one.probs) for one in llm.classify(TEXTS)
    ]


def test_an_encoder_says_what_it_cannot_do(embedder: tuple[Client, LLM]) -> None:
    client, _ = embedder
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/api/generate", {"prompt": "a", "stream": False}),
        ("/classify", {"input": "a"}),
    ):
        found = client.post(path, body)
        assert found.status == 400, (path, found.body)
        text = found.body.decode()
        assert "encoder" in text or "no classification head" in text
    assert client.post("/api/show", {}).json["capabilities"] == ["embedding"]
