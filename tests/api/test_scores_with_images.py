"""`score` and `rerank` of texts and images: with a model that answers yes or no, and by cosines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from sdk import LLM, RequestError
from tests.api.test_vision_models import QWEN_4, write_model
from tests.dual_models import write_dual
from tests.vision_prompts import picture, reference_inputs

EXACT: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "compute": "exact",
    "num_threads": 1,
}
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
SEARCH = "<Instruct>: Given a search query, retrieve relevant candidates that answer the query."
CLASSES = {"classifier_from_token": ["no", "yes"]}


def part(image: Any) -> dict[str, Any]:
    return {"type": "image", "image": image}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reranker")
    write_model(QWEN_4, made)
    return made


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_model_len=512, hf_overrides=CLASSES, **EXACT) as made:
        yield made


def expected(folder: Path, query: list[Any], document: list[Any]) -> float:
    """As Qwen3-VL-Reranker's own code: messages, and the probability of yes against no."""
    pictures = [one["image"] for one in (*query, *document) if one["type"] == "image"]
    plain = [
        {"type": "image"} if one["type"] == "image" else one
        for one in (text(SEARCH), text("<Query>:"), *query, text("\n<Document>:"), *document)
    ]
    messages = [{"role": "system", "content": [text(JUDGE)]}, {"role": "user", "content": plain}]
    given = reference_inputs(QWEN_4, messages, pictures)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("no", "yes")]
    with torch.no_grad():
        logits = model(**given).logits[0, -1, ids]
    return float(logits.softmax(-1)[1])


SMALL, NARROW = picture(40, 61, 1), picture(97, 30, 2)
PAIRS: list[tuple[Any, Any, list[Any], list[Any]]] = [
    ("a red page", "red", [text("a red page")], [text("red")]),
    ("a red page", {"content": [part(SMALL)]}, [text("a red page")], [part(SMALL)]),
    (
        {"content": [part(NARROW), text("like this")]},
        {"prompt": "a page", "multi_modal_data": {"image": SMALL}},
        [part(NARROW), text("like this")],
        [part(SMALL), text("a page")],
    ),
    ("", {"content": [part(SMALL)]}, [text("NULL")], [part(SMALL)]),
]


@pytest.mark.parametrize("pair", PAIRS, ids=["texts", "document", "both", "nothing"])
def test_scores_are_those_of_the_released_protocol(
    pair: tuple[Any, Any, list[Any], list[Any]], llm: LLM, folder: Path
) -> None:
    [found] = llm.score(pair[0], pair[1])
    assert abs(found.score - expected(folder, pair[2], pair[3])) < 2e-5


def test_documents_with_and_without_images_are_sorted_together(llm: LLM) -> None:
    documents = [
        "a text",
        {"content": [part(SMALL)]},
        {"content": [part(NARROW), text("b")]},
        {"content": [text("c"), part(SMALL), part(NARROW)]},
    ]
    found = llm.rerank("which one?", documents)
    alone = [llm.score("which one?", [one])[0].score for one in documents]
    assert [one.relevance_score for one in found] == sorted(alone, reverse=True)
    assert all(one.document is documents[one.index] for one in found)
    assert [one.index for one in llm.rerank("which one?", documents, top_n=1)] == [found[0].index]


def test_a_template_of_the_caller_places_images(llm: LLM) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    [found] = llm.score("a", {"content": [part(SMALL)]}, chat_template=template)
    prompt = "query:adocument:<|vision_start|><|image_pad|><|vision_end|>"
    [same] = llm.classify({"prompt": prompt, "multi_modal_data": {"image": SMALL}})
    assert found.score == same.probs[1]


def test_items_that_are_no_texts_or_images_are_named(llm: LLM, folder: Path) -> None:
    with pytest.raises(RequestError, match=r"documents\[1\]: expected a string, or .* found 3"):
        llm.rerank("a", ["b", 3])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="query: expected a string, or"):
        llm.rerank(None, ["b"])  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"score: expected a string, or .* found {'image': 1}"):
        llm.score("a", {"image": 1})
    named = pytest.raises(RequestError, match="expected one text, or one image for a dual encoder")
    with LLM(str(folder), max_model_len=256, **EXACT) as plain, named, pytest.warns(UserWarning):
        plain.score("a", {"content": [part(SMALL)]})


def test_a_dual_encoder_sorts_texts_and_images_by_cosine(tmp_path: Path) -> None:
    write_dual("clip", tmp_path)
    seen = {"prompt": "", "multi_modal_data": {"image": SMALL}}
    documents = [{"content": [part(SMALL)]}, "a photo of a dog", seen, {"content": [text("a map")]}]
    with LLM(str(tmp_path), **EXACT) as llm:
        found = {one.index: one.relevance_score for one in llm.rerank("a photo", documents)}
        prompts = ["a photo", seen, "a photo of a dog", "a map"]
        vectors = np.array([one.embedding for one in llm.embed(prompts)])
        wanted = vectors[1:] @ vectors[0]
        assert np.allclose([found[0], found[1], found[3]], wanted, atol=1e-6)
        assert found[0] == found[2]
        [same] = llm.score({"content": [part(SMALL)]}, seen)
        assert abs(same.score - 1) < 1e-6
        with pytest.raises(RequestError, match="expected one text, or one image"):
            llm.rerank("a photo", [{"content": [part(SMALL), text("x")]}])
