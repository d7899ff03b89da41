"""Vectors, classes and scores of images over HTTP."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from sdk import LLM
from sdk.serving import create_app
from tests.api.test_vision_models import QWEN_4, write_model
from tests.dual_models import write_dual
from tests.serving.serving import Client, running
from tests.vision_prompts import picture

SMALL = picture(40, 61, 1)


def url(pixels: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def part(pixels: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(pixels)}}


SEEN = {"prompt": "", "multi_modal_data": {"image": SMALL}}
#: The same image as Jina's and vLLM's APIs have it.
FORMS = [
    {"image": url(SMALL)},
    {"image": url(SMALL).partition(",")[2]},
    part(SMALL),
    {"content": [part(SMALL)]},
]


@pytest.fixture(scope="module")
def dual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, LLM]]:
    folder = tmp_path_factory.mktemp("dual")
    write_dual("siglip", folder)
    with (
        LLM(str(folder), num_threads=1) as llm,
        running(create_app(llm, model_name="m")) as client,
    ):
        yield client, llm


def test_images_have_vectors_in_the_forms_of_other_servers(dual: tuple[Client, LLM]) -> None:
    client, llm = dual
    wanted = [one.embedding for one in llm.embed(["a cat", SEEN])]
    for form in FORMS:
        found = client.post("/v1/embeddings", {"input": ["a cat", form]}).json["data"]
        assert [one["embedding"] for one in found] == [pytest.approx(x, abs=1e-6) for x in wanted]
    for content in ([part(SMALL)], "a cat"):
        messages = [{"role": "user", "content": content}]
        [found] = client.post("/v1/embeddings", {"messages": messages}).json["data"]
        assert found["embedding"] == pytest.approx(wanted[content != "a cat"], abs=1e-6)


def test_images_are_sorted_scored_and_named(dual: tuple[Client, LLM]) -> None:
    client, llm = dual
    asked = {"query": "a cat", "documents": [FORMS[0], "a dog", {"text": "a cat"}]}
    found = client.post("/v1/rerank", asked).json["results"]
    wanted = llm.rerank("a cat", [SEEN, "a dog", "a cat"])
    assert [one["index"] for one in found] == [one.index for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one["relevance_score"] == pytest.approx(other.relevance_score, abs=1e-6)
        assert ("document" in one) == (one["index"] != 0)
    scores = client.post("/v1/score", {"text_1": FORMS[3], "text_2": ["a cat", FORMS[1]]}).json
    assert scores["data"][1]["score"] == pytest.approx(1, abs=1e-6)
    labels = ["a cat", "a dog"]
    [found] = client.post("/classify", {"input": [FORMS[2]], "labels": labels}).json["data"]
    [classes] = llm.classify(SEEN, labels=labels)
    assert found["label"] == classes.label
    assert found["probs"] == pytest.approx(classes.probs, abs=1e-6)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([{"image": 3}], "input[0]: expected an image in base64"),
        ([{"picture": "x"}], "input[0]: expected a text, {'text': text}"),
        ([3.5, {"text": "a"}], "input[0]: expected a text, {'text': text}"),
        ([{"type": "image", "image": "/etc/passwd"}], "expected {'type': 'image_url'"),
        ([{"image": "data:image/png;base64,AAAA"}], "multi_modal_data.image"),
        ([{"content": [part(SMALL), part(SMALL)]}], "expected one text, or one image"),
        ([{"prompt": "", "multi_modal_data": {"image": "/etc/passwd"}}], "input[0]: expected a"),
        (
            [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}],
            "this server allows no hosts",
        ),
    ],
)
def test_other_images_are_refused(given: Any, named: str, dual: tuple[Client, LLM]) -> None:
    client, _ = dual
    found = client.post("/v1/embeddings", {"input": given})
    assert found.status == 400 and named in found.error["message"], found.error


def test_messages_are_one_prompt(dual: tuple[Client, LLM]) -> None:
    client, _ = dual
    one = {"role": "user", "content": "a"}
    for body, named in (
        ({"messages": [one, one]}, "expected one with a text or an image, found 2"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [one], "input": "a"}, "expected one of the two, found both"),
    ):
        found = client.post("/v1/embeddings", body)
        assert found.status == 400 and named in found.error["message"]


def test_a_conversation_with_images_has_a_vector(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Of a model that embeds images among texts."""
    folder = tmp_path_factory.mktemp("seeing")
    write_model(QWEN_4, folder)
    messages = [{"role": "user", "content": [part(SMALL), {"type": "text", "text": "what?"}]}]
    with (
        LLM(str(folder), num_threads=1, max_model_len=512) as llm,
        running(create_app(llm, model_name="m")) as client,
    ):
        asked = {"messages": messages, "add_generation_prompt": True}
        [found] = client.post("/v1/embeddings", asked).json["data"]
        text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what?<|im_end|>\n"
        prompt = text + "<|im_start|>assistant\n"
        [wanted] = llm.embed({"prompt": prompt, "multi_modal_data": {"image": SMALL}})
        assert found["embedding"] == pytest.approx(wanted.embedding, abs=1e-6)
        [shorter] = client.post("/v1/embeddings", {"messages": messages}).json["data"]
        [wanted] = llm.embed({"prompt": text, "multi_modal_data": {"image": SMALL}})
        assert shorter["embedding"] == pytest.approx(wanted.embedding, abs=1e-6)
        refused = client.post("/v1/embeddings", {"input": [{"image": url(SMALL)}]})
        assert refused.status == 400 and "placeholders" in refused.error["message"]


def test_a_model_of_text_says_that_it_reads_no_images(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    from tests.tiny_encoders import build

    folder = tmp_path_factory.mktemp("text")
    build(folder, "BertModel", 2)
    with LLM(folder, num_threads=1) as llm, running(create_app(llm, model_name="m")) as client:
        found = client.post("/v1/embeddings", {"input": [{"image": url(SMALL)}, "a"]})
        assert found.status == 400 and "this model reads no images" in found.error["message"]
