"""Vectors and classes over HTTP, with models whose files say something about them."""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM
from sdk.serving import create_app
from sdk.testing import tiny_model
from tests.serving.serving import Client, Serve, running

TEXTS = ["a b c", "d"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "float16")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[Client, LLM]]:
    """A model with classes and with vectors that may be shortened."""
    overrides: dict[str, Any] = {
        "classifier_from_token": ["a", "b"],
        "matryoshka_dimensions": [16, 64],
    }
    with (
        LLM(folder, hf_overrides=overrides, max_model_len=64) as llm,
        running(create_app(llm, model_name="m")) as client,
    ):
        yield client, llm


def test_shortened_vectors_have_length_one(served: tuple[Client, LLM]) -> None:
    client, llm = served
    [whole, _] = llm.embed(TEXTS)
    head = whole.embedding[:16]
    length = sum(x * x for x in head) ** 0.5
    for path, name in (("/v1/embeddings", "data"), ("/api/embed", "embeddings")):
        found = client.post(path, {"input": TEXTS, "dimensions": 16}).json[name]
        vector = found[0]["embedding"] if name == "data" else found[0]
        assert vector == pytest.approx([x / length for x in head], abs=1e-6) and len(found) == 2
    asked = {"input": TEXTS[0], "dimensions": 16, "encoding_format": "base64"}
    packed = client.post("/v1/embeddings", asked).json["data"][0]["embedding"]
    assert struct.unpack("<16f", base64.b64decode(packed)) == pytest.approx(vector, abs=1e-6)
    for wrong in (8, 0, "16", True, 10**9):
        found = client.post("/v1/embeddings", {"input": "a", "dimensions": wrong})
        assert found.status == 400 and "dimensions: expected one of 16, 64" in found.body.decode()


def test_without_a_list_any_number_up_to_the_vector_s_is_right(folder: Path) -> None:
    with LLM(folder, hf_overrides={"is_matryoshka": True}, max_model_len=64) as llm:
        width = llm.model_config.hidden_size
        with running(create_app(llm)) as client:
            for count in (1, width):
                found = client.post("/v1/embeddings", {"input": "a", "dimensions": count}).json
                assert len(found["data"][0]["embedding"]) == count
            found = client.post("/v1/embeddings", {"input": "a", "dimensions": width + 1})
            assert found.status == 400
            assert f"expected at most {width}" in found.error["message"]
            found = client.post("/v1/embeddings", {"input": "a", "dimensions": -1})
            assert "expected a positive integer" in found.error["message"]


def test_other_models_have_vectors_of_one_size(serve: Serve) -> None:
    client, llm = serve()
    for path in ("/v1/embeddings", "/api/embed"):
        found = client.post(path, {"input": "a", "dimensions": 4})
        assert found.status == 400 and "neither matryoshka_dimensions nor" in found.body.decode()
    assert llm.requests == []


def test_classes(served: tuple[Client, LLM]) -> None:
    client, llm = served
    expected = llm.classify(TEXTS)
    found = client.post("/classify", {"model": "m", "input": TEXTS}).json
    assert found["object"] == "list" and found["model"] == "m"
    assert found["usage"]["prompt_tokens"] == sum(len(one.prompt_token_ids) for one in expected)
    for index, (one, wanted) in enumerate(zip(found["data"], expected, strict=True)):
        assert (one["index"], one["label"], one["num_classes"]) == (index, wanted.label, 2)
        assert one["probs"] == pytest.approx(wanted.probs, abs=1e-6)
    [logits] = client.post("/classify", {"input": "a", "use_activation": False}).json["data"]
    [wanted] = llm.classify("a", use_activation=False)
    assert logits["probs"] == pytest.approx(wanted.probs, abs=1e-5)
    pooled = client.post("/pooling", {"input": TEXTS, "task": "classify"}).json["data"]
    assert [one["data"] for one in pooled] == [one["probs"] for one in found["data"]]


def test_pooled_states(served: tuple[Client, LLM]) -> None:
    client, llm = served
    found = client.post("/pooling", {"input": TEXTS}).json
    assert [one["object"] for one in found["data"]] == ["pooling", "pooling"]
    expected = [one.outputs.data for one in llm.encode(TEXTS, pooling="token")]
    for one, wanted in zip(found["data"], expected, strict=True):
        assert [len(row) for row in one["data"]] == [wanted.shape[1]] * wanted.shape[0]
        assert one["data"][-1] == pytest.approx(wanted[-1].tolist(), abs=1e-6)
    packed = client.post("/pooling", {"input": TEXTS[0], "encoding_format": "base64"}).json
    data = base64.b64decode(packed["data"][0]["data"])
    assert len(data) == 4 * expected[0].numel()
    [raw] = client.post("/pooling", {"input": "a", "normalize": False, "task": "embed"}).json[
        "data"
    ]
    [wanted] = llm.encode("a", normalize=False)
    assert raw["data"] == pytest.approx(wanted.outputs.data.tolist(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/pooling", {"input": "a", "task": "token_classify"}, "task: expected one of token_embed"),
        ("/pooling", {"input": "a", "task": "classify"}, "classify: this model has no"),
        ("/pooling", {}, "input: expected a text"),
        ("/pooling", {"input": "a", "encoding_format": "x"}, "encoding_format: expected"),
        ("/pooling", {"input": "a", "normalize": 1}, "normalize: expected true or false"),
        ("/pooling", {"input": "a", "frobnicate": 1}, "frobnicate: unknown parameter"),
        ("/classify", {"input": "a"}, "classify: this model has no classification head"),
        ("/classify", {"input": []}, "input: expected a text"),
        ("/classify", {"input": "a", "activation": "x"}, "activation: expected true or false"),
    ],
)
def test_bad_parameters(serve: Serve, path: str, body: dict[str, Any], message: str) -> None:
    client, _ = serve()
    found = client.post(path, body)
    assert found.status == 400 and message in found.error["message"]


def test_texts_get_the_default_prompt_of_the_files(folder: Path, tmp_path: Path) -> None:
    """The route reads texts before `embed` does; what the files put before them is still there."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(kinds)
    ]
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    pooling = {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True}
    prompts = {"prompts": {"query": "find: "}, "default_prompt_name": "query"}
    for name, value in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("config_sentence_transformers.json", prompts),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    with (
        LLM(tmp_path, max_model_len=64, hf_overrides={"is_matryoshka": True}) as llm,
        running(create_app(llm)) as client,
    ):
        [wanted] = llm.embed("a b")
        found = client.post("/v1/embeddings", {"input": "a b"}).json
        vector = found["data"][0]["embedding"]
        assert vector == pytest.approx(wanted.embedding, abs=1e-6)
        assert found["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
        [ollama] = client.post("/api/embed", {"input": "a b"}).json["embeddings"]
        pooled = client.post("/pooling", {"input": "a b", "task": "embed", "normalize": False}).json
        assert sum(x * x for x in ollama) == pytest.approx(1)
        assert ollama[0] / vector[0] == pytest.approx(ollama[1] / vector[1], rel=1e-4)
        assert pooled["data"][0]["data"] == pytest.approx(vector)
        # the files do not scale these vectors to length 1, so that shortened ones are not either
        short = client.post("/v1/embeddings", {"input": "a b", "dimensions": 4}).json
        assert short["data"][0]["embedding"] == pytest.approx(vector[:4])
